"""The engine on SmolLM2: every cleverness gives the tokens of one request alone in a large pool.

In float32, and in the bytes of the numba runner, whose logits are the same to the bit in every schedule.
"""

from __future__ import annotations

import pytest

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.config import SchedulerConfig
from backends.llm.loaders import load_model
from backends.llm.runners.cpu import numba_lacks, open_cpu_runner
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.tokenizers import load_tokenizer

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a king who had three daughters, and the youngest of them was",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is",
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Germany is",
]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


class FewBlocks:
    """A runner that says it has fewer blocks than it has."""

    def __init__(self, runner, num_blocks):
        self._runner, self.num_blocks = runner, num_blocks

    def __getattr__(self, name):
        return getattr(self._runner, name)


@pytest.fixture(scope="module", params=["exact", "numba"])
def parts(request, smollm2):
    model = load_model(smollm2)
    options = CpuOptions(exact=request.param == "exact", kv_cache_bytes=1 << 27, num_threads=2)
    if request.param == "numba" and numba_lacks(model.config, options):
        pytest.skip(numba_lacks(model.config, options))
    runner = open_cpu_runner("numba" if request.param == "numba" else "openvino", model, options)
    yield runner, load_tokenizer(smollm2)
    runner.close()


def make_engine(parts, num_blocks=None, num_draft_tokens=0, **config):
    runner, tokenizer = parts
    runner = FewBlocks(runner, num_blocks) if num_blocks else runner
    return LLMEngine(runner, tokenizer, SchedulerConfig(**config), num_draft_tokens=num_draft_tokens)


@pytest.fixture(scope="module")
def plain(parts):
    """The answers one by one, whole prompts, nothing cached."""
    engine = make_engine(parts, enable_prefix_cache=False)
    return [engine.generate([prompt], PARAMS)[0].outputs[0] for prompt in PROMPTS]


def answers(engine, params=PARAMS):
    return [list(result.outputs[0].token_ids) for result in engine.generate(PROMPTS, params)]


def test_together_in_small_steps(parts, plain):
    engine = make_engine(parts, max_num_batched_tokens=8, max_num_seqs=6)
    assert answers(engine) == [list(p.token_ids) for p in plain]


def test_g04_preempted(parts, plain):
    num_blocks = 6 * 32 // parts[0].block_size
    engine = make_engine(parts, num_blocks=num_blocks, max_num_batched_tokens=64, max_num_seqs=6)
    assert answers(engine) == [list(p.token_ids) for p in plain]
    assert engine.stats().scheduler.num_preemptions > 0
    assert engine.stats().scheduler.num_free_blocks == num_blocks


def test_from_the_prefix_cache(parts, plain):
    engine = make_engine(parts)
    assert answers(engine) == [list(p.token_ids) for p in plain]
    before = engine.stats().scheduler.num_prefix_hits
    assert answers(engine) == [list(p.token_ids) for p in plain]
    assert engine.stats().scheduler.num_prefix_hits >= before  # in blocks of 32 tokens short prompts fill none
    long = PROMPTS[2] * 5
    first, second = (engine.generate([long], PARAMS)[0] for _ in range(2))
    assert second.usage.num_cached_tokens >= 64
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_speculative(parts, plain):
    engine = make_engine(parts, num_draft_tokens=4)
    assert answers(engine) == [list(p.token_ids) for p in plain]
    assert engine.stats().num_draft_tokens > 0


def test_streams_are_the_texts(parts, plain):
    engine = make_engine(parts)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, PARAMS)
    texts = [""] * len(PROMPTS)
    while engine.has_requests:
        for output in engine.step():
            texts[int(output.request_id)] += output.delta.text
    assert texts == [p.text for p in plain]
