"""config.pbtxt of a model for the `llm` backend: the tensors that Triton's vLLM backend made customary."""

from __future__ import annotations

from typing import Any

from compiler.spec import Serving
from compiler.triton_config import TensorConfig, add_serving, base_config

BACKEND = "llm"
INPUTS = {
    "text_input": "TYPE_STRING",
    "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING",
    "exclude_input_in_output": "TYPE_BOOL",
    "return_finish_reason": "TYPE_BOOL",
    "return_cumulative_logprob": "TYPE_BOOL",
    "return_logprobs": "TYPE_BOOL",
    "return_num_input_tokens": "TYPE_BOOL",
    "return_num_output_tokens": "TYPE_BOOL",
}
OUTPUTS = {
    "text_output": "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
}
REQUIRED = frozenset({"text_input"})


def llm_config(name: str, kind: str) -> Any:
    """Returns the ModelConfig: decoupled, since an answer comes in many responses; one instance, which batches."""
    config = base_config(
        name,
        BACKEND,
        0,
        [TensorConfig(tensor, triton_type, (1,)) for tensor, triton_type in INPUTS.items()],
        [TensorConfig(tensor, triton_type, (-1,)) for tensor, triton_type in OUTPUTS.items()],
    )
    for tensor in config.input:
        tensor.optional = tensor.name not in REQUIRED
    config.model_transaction_policy.decoupled = True
    add_serving(config, Serving(), {}, kind)
    return config
