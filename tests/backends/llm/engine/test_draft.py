"""A draft model in the engine: the same answers in fewer steps, its share of the memory, its vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.draft import DraftModel, open_draft
from backends.llm.engine.load import DRAFT_MODEL_TOKENS, engine_settings
from backends.llm.loaders import load_model
from backends.llm.sampling.draft_model import DraftModelProposer
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import ModelRefused, UsageError
from tests.backends.llm.engine.test_engine import ToyTokenizer
from tests.backends.llm.engine.toy import VOCAB_SIZE, ToyRunner
from tests.backends.llm.runners.tiny_models import build

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [4] * 11]


class Closing(ToyRunner):
    closed = False

    def close(self):
        self.closed = True


class OftenWrong(Closing):
    """A smaller model: of three next tokens it knows two."""

    def execute(self, output):
        found = super().execute(output)
        wrong = found.logits.argmax(axis=1) % 3 == 0 if len(found.logits) else np.zeros(0, bool)
        found.logits[wrong] = np.roll(found.logits[wrong], 1, axis=1)
        return found


def make_engine(draft=None, num_draft_tokens=0, num_blocks=64):
    proposer = draft and DraftModelProposer(draft, vocab_size=VOCAB_SIZE, max_model_len=64)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    runner = Closing(num_blocks, 4)
    return LLMEngine(runner, ToyTokenizer(), config, num_draft_tokens=num_draft_tokens, proposer=proposer)


def answers(engine, params):
    return [result.outputs for result in engine.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", [Closing, OftenWrong])
def test_a_draft_model_changes_no_answer(draft, temperature):
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=7)
    plain = make_engine()
    drafter = draft(64, 4)
    drafting = make_engine(drafter, num_draft_tokens=3, num_blocks=24)  # so few that requests are preempted
    drafting._speculator.controller.plan = lambda ids: dict.fromkeys(ids, 3)
    assert answers(drafting, params) == answers(plain, params)
    stats = drafting.stats()
    assert stats.num_steps < plain.stats().num_steps or temperature
    assert stats.num_draft_tokens > 0 and (stats.num_accepted_tokens > 0 or temperature)
    if draft is OftenWrong and not temperature:
        assert 0.3 < stats.acceptance_rate < 0.9
    assert stats.scheduler.num_free_blocks == 24
    drafting.close()
    assert drafter.closed and drafting._runner.closed


class Clock:
    """Each call of a model takes its time."""

    now_ns = 0

    def __call__(self):
        return self.now_ns


def timed(runner, clock, seconds):
    execute = runner.execute

    def slow(output):
        clock.now_ns += round(1e9 * (seconds + 1e-4 * output.num_tokens))
        return execute(output)

    runner.execute = slow
    return runner


@pytest.mark.parametrize("seconds, pays", [(0.0005, True), (0.02, False)])
def test_it_goes_off_by_itself_where_it_costs_more_than_it_gives(seconds, pays):
    """A step of the model takes 10 ms; the drafts are all accepted, and only their cost decides."""
    clock = Clock()
    draft = timed(Closing(64, 4), clock, seconds)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256)
    engine = LLMEngine(
        timed(Closing(128, 4), clock, 0.01),
        ToyTokenizer(),
        config,
        num_draft_tokens=3,
        proposer=DraftModelProposer(draft, vocab_size=VOCAB_SIZE, max_model_len=256),
        clock_ns=clock,
    )
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=240, ignore_eos=True), progress=False)
    stats = engine.stats()
    if pays:
        assert stats.num_steps < 120
    else:
        assert stats.num_steps > 200 and stats.num_draft_tokens < 40


def test_options():
    settings = engine_settings({"draft_model": "small.gguf"})
    assert (settings.num_draft_tokens, settings.draft_model.name) == (DRAFT_MODEL_TOKENS, "small.gguf")
    assert engine_settings({"draft_model": "small.gguf", "num_draft_tokens": 2}).num_draft_tokens == 2
    assert engine_settings({"draft_model": "small.gguf", "num_draft_tokens": 0}).draft_model is None
    with pytest.raises(UsageError, match="draft_model is 3"):
        engine_settings({"draft_model": 3})


def test_another_vocabulary_is_refused(smollm2):
    class Other:
        def __init__(self, tokenizer, **changes):
            self._tokenizer, self._changes = tokenizer, changes

        def __getattr__(self, name):
            return self._changes.get(name) or getattr(self._tokenizer, name)

    settings = engine_settings({"draft_model": smollm2})
    tokenizer, config = load_tokenizer(smollm2), load_model(smollm2).config
    for changes, words in (
        ({"vocab_size": 7}, "it has 49152 tokens, the model 7"),
        ({"eos_token_ids": frozenset({5})}, r"its end tokens are \[0, 2\], the model's \[5\]"),
        ({"token_bytes": lambda i: b"x"}, "token 0 is b'', the model's b'x'"),
    ):
        with pytest.raises(ModelRefused, match=f"has another vocabulary: {words}"):
            open_draft(settings, Other(tokenizer, **changes), config)
    draft = open_draft(settings, tokenizer, config)
    # Two models of one size: each gets half of the memory.
    assert draft.kv_cache_bytes == draft.settings.runner_options.kv_cache_bytes == (1 << 30) // 2


def test_a_share_without_room_for_one_request_is_refused():
    settings = engine_settings({"runner": "openvino", "draft_model": "small.gguf", "num_threads": 1})
    draft = DraftModel(build("llama")[1], settings, kv_cache_bytes=1 << 16, vocab_size=131)
    with pytest.raises(UsageError, match=r"has 2 blocks of 32 tokens in its share; one request of 256 tokens needs 8"):
        draft.proposer(256)


def test_smollm2_as_its_own_draft(smollm2):
    """Real files and runners: every draft is right, so four tokens come with each step; the cache is shared out."""
    options = {"exact": True, "kv_cache_bytes": 64 << 20, "num_threads": 2, "max_model_len": 256}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = LLMEngine.load(smollm2, draft_model=smollm2, **options)
    answers, steps = [], []
    for count in (0, 3):
        engine._speculator.controller.plan = lambda ids, count=count: dict.fromkeys(ids, count)
        before = engine.stats().num_steps
        answers.append(engine.generate(["The capital of France is"], params, progress=False)[0].outputs)
        steps.append(engine.stats().num_steps - before)
    assert answers[1] == answers[0]
    assert steps[0] == 20 and steps[1] <= 7 and engine.stats().acceptance_rate == 1.0
    assert engine.stats().scheduler.num_blocks == (32 << 20) // (46_080 * 32)
    engine.close()
