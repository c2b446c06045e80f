"""Small Python models that echo, sleep and fail, served on a real tritonserver."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compiler.addresses import ServerOptions
from compiler.server import TritonServer

_MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seen = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            self.seen += 1
{body}
        return responses
"""

_ECHO = """
            value = pb_utils.get_input_tensor_by_name(request, "{input}").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("{output}", value)]))
"""

_FAIL_EACH_10TH = """
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if self.seen % 10 == 0:
                error = pb_utils.TritonError("every 10th request fails")
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
"""

_OPTIONAL = """
            total = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B")
            if b is not None:
                total = total + b.as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", total)]))
"""

_BIG = """
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            value = np.arange(count, dtype=np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("VALUES", value)]))
"""

_FP32_PAIR = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }
"""


def _sleep(seconds: float) -> str:
    return f"            time.sleep({seconds})" + _ECHO.format(input="INPUT0", output="OUTPUT0")


# name -> (config.pbtxt without the backend, body of execute)
_MODELS: dict[str, tuple[str, str]] = {
    "echo": (
        "max_batch_size: 8\ndynamic_batching {}\n" + _FP32_PAIR,
        _ECHO.format(input="INPUT0", output="OUTPUT0"),
    ),
    "echo_text": (
        "max_batch_size: 8\ndynamic_batching {}\n"
        'input { name: "TEXT" data_type: TYPE_STRING dims: [-1] }\n'
        'output { name: "TEXT_OUT" data_type: TYPE_STRING dims: [-1] }\n',
        _ECHO.format(input="TEXT", output="TEXT_OUT"),
    ),
    "sleep_5ms": ("max_batch_size: 8\n" + _FP32_PAIR, _sleep(0.005)),
    "sleep_50ms": (
        "max_batch_size: 8\ninstance_group { count: 2 kind: KIND_CPU }\n" + _FP32_PAIR,
        _sleep(0.05),
    ),
    "flaky": ("max_batch_size: 8\n" + _FP32_PAIR, _FAIL_EACH_10TH),
    "optional": (
        'max_batch_size: 0\ninput { name: "A" data_type: TYPE_FP32 dims: [2] }\n'
        'input { name: "B" data_type: TYPE_FP32 dims: [2] optional: true }\n'
        'output { name: "SUM" data_type: TYPE_FP32 dims: [2] }\n',
        _OPTIONAL,
    ),
    "big": (
        'max_batch_size: 0\ninput { name: "COUNT" data_type: TYPE_INT32 dims: [1] }\n'
        'output { name: "VALUES" data_type: TYPE_FP32 dims: [-1] }\n',
        _BIG,
    ),
}

# Two 50 ms sleeps from one input: wall time is about one of them, the counters show both (d08).
_PARALLEL_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [4] }
output { name: "LEFT" data_type: TYPE_FP32 dims: [4] }
output { name: "RIGHT" data_type: TYPE_FP32 dims: [4] }
ensemble_scheduling {
  step { model_name: "sleep_50ms" model_version: -1
         input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "LEFT" } }
  step { model_name: "sleep_50ms" model_version: -1
         input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "RIGHT" } }
}
"""

# The tensors of docs/serving_llm.md; the model is chat_model.py.
_CHAT_INPUTS = {
    "text_input": "STRING",
    "input_ids": "INT32",
    "stream": "BOOL",
    "sampling_parameters": "STRING",
    **dict.fromkeys(("max_tokens", "top_k", "logprobs", "priority"), "INT32"),
    **dict.fromkeys(("temperature", "top_p", "deadline_ms"), "FP32"),
    "seed": "INT64",
    **dict.fromkeys(("stop", "client", "cache_salt"), "STRING"),
    "exclude_input_in_output": "BOOL",
    **{
        f"return_{name}": "BOOL"
        for name in (
            "finish_reason",
            "cumulative_logprob",
            "logprobs",
            "num_input_tokens",
            "num_output_tokens",
            "num_cached_tokens",
            "token_ids",
        )
    },
}
_CHAT_OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "cumulative_logprob": "FP32",
    "logprobs": "STRING",
    **dict.fromkeys(("num_input_tokens", "num_output_tokens", "num_cached_tokens"), "UINT32"),
    "token_ids": "INT32",
}


# A language model of another maker that never says why an answer ends.
_UNTOLD_INPUTS = ("text_input", "stream", "sampling_parameters")


def _chat_config(inputs: Iterable[str] = _CHAT_INPUTS, outputs: Iterable[str] = _CHAT_OUTPUTS) -> str:
    lines = ['backend: "python"', "max_batch_size: 0", "model_transaction_policy { decoupled: true }"]
    for name in inputs:
        size = -1 if name in ("input_ids", "stop") else 1
        lines.append(f'input {{ name: "{name}" data_type: TYPE_{_CHAT_INPUTS[name]} dims: [{size}] optional: true }}')
    lines += [f'output {{ name: "{name}" data_type: TYPE_{_CHAT_OUTPUTS[name]} dims: [-1] }}' for name in outputs]
    return "\n".join(lines)


@dataclass(frozen=True)
class TritonAddress:
    """Where the server listens: `host:port` without a scheme."""

    http_url: str
    grpc_url: str


def write_repository(root: Path) -> Path:
    """Write the test models under `root` and return it."""
    for name, (config, body) in _MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')
        (root / name / "1" / "model.py").write_text(_MODEL.format(body=body))
    (root / "parallel" / "1").mkdir(parents=True)
    (root / "parallel" / "config.pbtxt").write_text(_PARALLEL_ENSEMBLE)
    write_chat_model(root)
    write_chat_model(root, "untold", _chat_config(_UNTOLD_INPUTS, ("text_output",)))
    return root


def write_chat_model(root: Path, name: str = "chat", config: str = _chat_config()) -> None:
    """Write one model, that of chat_model.py."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    shutil.copy(Path(__file__).with_name("chat_model.py"), root / name / "1" / "model.py")


@contextmanager
def run_triton(folder: Path) -> Iterator[TritonAddress]:
    """Serves the test models from `folder` on free ports, as `compile serve` does."""
    options = ServerOptions(write_repository(folder / "repository"), http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:
        yield TritonAddress(server.addresses.http, server.addresses.grpc)
