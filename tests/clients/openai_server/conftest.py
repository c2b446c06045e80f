"""One real server with a scripted language model and an embedder, and the front end beside it."""

from __future__ import annotations

import json
import shutil
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from compiler.llm.config import llm_config
from compiler.triton_config import text_from_config
from tests.serving import Served, serve, write_python_model

MAX_NUM_SEQS, MAX_WAITING = 4, 12  # of the tiny model
SPECIAL = ["<bos>", "<eos>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<system>Tools: {{ tools | tojson }} Call them as <tool_call>{...}</tool_call>"
    "{% endif %}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}no{% endif %}{% endif %}"
)
CHAT_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""
EMBED_CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            rows = [[len(t), len(texts), t[0] if t else 0, 0.5] for t in texts]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("vector", np.array(rows, np.float32))]))
        return answers
"""
EMBED_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "vector" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def write_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer that puts <bos> before a text, with a chat template that writes it too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def write_tiny_llm(folder: Path) -> None:
    """A Llama with random weights and the tokenizer above, as `compile llm` publishes one, without its proof."""
    tokenizer = write_tokenizer(folder)
    vocab, hidden, mlp, layers, kv_heads, head_dim = tokenizer.get_vocab_size(), 64, 96, 2, 2, 16
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    config |= {"head_dim": head_dim, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    config |= {"hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 0}
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv_heads * head_dim, hidden) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, mlp)
    chance = np.random.default_rng(0)
    weights = {name: chance.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {name: np.ones(shape, np.float32) for name, shape in shapes.items() if len(shape) == 1}
    # The head is the embedding: tokens that are no letter get logits of 0, and greedy answers are letters.
    letters = [tokenizer.token_to_id(letter) for letter in string.ascii_letters]
    weights["model.embed_tokens.weight"][np.setdiff1d(np.arange(vocab), letters)] = 0
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    engine = {"exact": True, "kv_cache_bytes": 16 << 20, "max_model_len": 8192}
    engine |= {"max_num_seqs": MAX_NUM_SEQS, "max_waiting": MAX_WAITING}
    (folder / "engine.json").write_text(json.dumps(engine))
    (folder.parent / "config.pbtxt").write_text(text_from_config(llm_config(folder.parent.name, "KIND_CPU")))


def write_repository(repository: Path) -> None:
    inputs = {
        "text_input": "STRING",
        "input_ids": "INT32",
        "stream": "BOOL",
        "sampling_parameters": "STRING",
        "priority": "INT32",
    }
    inputs |= {"client": "STRING", "cache_salt": "STRING", "deadline_ms": "FP32", "exclude_input_in_output": "BOOL"}
    returned = ("finish_reason", "logprobs", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
    inputs |= {f"return_{name}": "BOOL" for name in returned}
    outputs = {"text_output": "STRING", "finish_reason": "STRING", "logprobs": "STRING"}
    outputs |= {name: "UINT32" for name in returned[2:]}
    lines = [CHAT_CONFIG]
    for name, kind in inputs.items():
        lines.append(f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [ -1 ] optional: true }}')
    lines += [f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [ -1 ] }}' for name, kind in outputs.items()]
    folder = write_python_model(repository, "scripted", code="", config="\n".join(lines))
    shutil.copy(Path(__file__).with_name("scripted_model.py"), folder / "1" / "model.py")
    write_tokenizer(folder / "1")
    manifest = {"llm": {"max_model_len": 4096}}
    (folder / "1" / "manifest.json").write_text(json.dumps(manifest))
    write_python_model(repository, "embedder", EMBED_CODE, EMBED_CONFIG)
    write_tokenizer(repository / "embedder" / "1")
    write_tiny_llm(repository / "tiny" / "1")
    write_python_model(repository, "identity")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openai")


@pytest.fixture(scope="session")
def front(folder: Path) -> Iterator[Served]:
    write_repository(folder / "repository")
    with serve(folder / "repository", "--openai-port", "0", log=folder / "log") as served:
        yield served


@pytest.fixture
def logged(folder: Path, front: Served) -> Callable[[str], str]:
    """Returns the first line of the front end's log with a text in it; it may come a little after the answer."""

    def find(text: str) -> str:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for line in (folder / "log").read_text().splitlines():
                if text in line:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"{text!r} is not in the log")

    return find


@pytest.fixture(scope="session")
def client(front: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=front.openai, api_key="none", max_retries=0) as found:
        yield found
