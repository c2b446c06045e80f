"""Real models: greedy answers equal those of `transformers` in float32 on the same dequantised weights, to the token.

`pytest -m soak tests/backends/llm/runners/test_real_models.py` is the full form: 32 prompts, 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.llm.loaders import load_model
from backends.llm.loaders.base import LoadedModel
from backends.llm.models.weights import values
from backends.llm.runners.base import ModelRunner
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.openvino import OpenVinoRunner
from backends.llm.runners.torch_runner import TorchRunner
from tests.backends.llm.runners.plain_loop import greedy

SHORT, FULL = (6, 16), (32, 64)


def _prompts(vocab_size: int, count: int) -> list[list[int]]:
    """Returns prompts of 3 to 70 tokens."""
    random = np.random.default_rng(11)
    lengths = random.integers(3, 71, count)
    return [random.integers(300, min(vocab_size, 20000), length).tolist() for length in lengths]


def _transformers(model: LoadedModel) -> torch.nn.Module:
    import transformers as hf

    c = model.config
    common: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
    }
    if c.architecture == "llama":
        theirs = hf.LlamaForCausalLM(
            hf.LlamaConfig(**common, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta})
        )
    else:
        kinds = {True: "sliding_attention", False: "full_attention"}
        theirs = hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(
                **common,
                query_pre_attn_scalar=round(c.query_scale**-2),
                sliding_window=c.sliding_window,
                layer_types=[kinds[w] for w in c.windowed_layers],
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": c.rope_theta},
                    "sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope_theta},
                },
            )
        )
    state = {name: torch.from_numpy(values(weight)) for name, weight in model.weights.items()}
    if c.architecture == "gemma3":  # what they add to each norm stands in the file's weights already
        state = {name: w + (c.norm_offset - 1 if "norm" in name else 0) for name, w in state.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return theirs.eval()


def _greedy_by_transformers(theirs: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[int]:
    """Returns their choice after each token of an answer; if all are the answer's, it is their greedy answer."""
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return chosen


def _openvino(model: LoadedModel) -> ModelRunner:
    return OpenVinoRunner(model, CpuOptions(exact=True, kv_cache_bytes=1 << 29, num_threads=2))


def _torch(model: LoadedModel) -> ModelRunner:
    return TorchRunner(model, num_blocks=600, block_size=16)


RUNNERS: list[Callable[[LoadedModel], ModelRunner]] = [_openvino, _torch]


def _check(path: Path, size: tuple[int, int]) -> None:
    model = load_model(path)
    prompts = _prompts(model.config.vocab_size, size[0])
    theirs = _transformers(model)
    for make in RUNNERS:
        runner = make(model)
        answers = greedy(runner, prompts, size[1])
        runner.close()
        assert len({tuple(answer) for answer in answers}) > 0.9 * len(prompts), "answers must tell the prompts apart"
        wanted = [_greedy_by_transformers(theirs, *pair) for pair in zip(prompts, answers, strict=True)]
        assert answers == wanted, make.__name__


def test_smollm2_answers_as_transformers(smollm2: Path) -> None:
    _check(smollm2, SHORT)


@pytest.mark.soak
def test_smollm2_answers_as_transformers_in_full(smollm2: Path) -> None:
    _check(smollm2, FULL)


@pytest.mark.soak
def test_gemma3_answers_as_transformers(gemma3: Path) -> None:
    _check(gemma3, SHORT)
