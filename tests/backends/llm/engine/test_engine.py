"""LLMEngine on the toy model: answers, streams, stops, n, log probabilities, aborts, deadlines, errors."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.request import FinishReason
from backends.llm.errors import InvalidRequest, RequestRefused
from backends.llm.sampling.ngram import NgramProposer
from backends.llm.sampling.proposer import Draft
from tests.backends.llm.engine.toy import VOCAB_SIZE, ToyRunner, next_token, plain_answer

END = VOCAB_SIZE - 1


class ToyTokenizer:
    """Token 26 * n + i is the letter a + i."""

    vocab_size = VOCAB_SIZE
    bos_token_id = None
    eos_token_ids = frozenset([END])

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) - ord("a") for c in text]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(self.token_bytes(t).decode() for t in token_ids)

    def token_bytes(self, token_id, *, with_special=False):
        return b"" if token_id == END else bytes([ord("a") + token_id % 26])

    def chat(self, messages, *, tools=(), add_generation_prompt=True):
        raise NotImplementedError


class Clock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


def make_engine(num_blocks=64, clock=None, num_draft_tokens=0, **config):
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128}
    return LLMEngine(
        ToyRunner(num_blocks, 4),
        ToyTokenizer(),
        SchedulerConfig(**{**defaults, **config}),
        num_draft_tokens=num_draft_tokens,
        clock_ns=clock or Clock(),
    )


def letters(token_ids):
    return ToyTokenizer().decode(token_ids)


def run(engine):
    """Returns all step outputs by request id."""
    found = {}
    while engine.has_requests:
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).append(output)
    return found


def test_generate_gives_the_answers_of_the_plain_way_in_the_order_of_the_prompts():
    engine = make_engine()
    prompts = ["hello", "a", [3, 1, 4, 1, 5, 9, 2, 6], "hello"]
    results = engine.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        ids = ToyTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        (output,) = result.outputs
        assert list(output.token_ids) == plain_answer(ids, 10)
        assert output.text == letters(output.token_ids)
        assert output.finish_reason == "length" and output.logprobs is None
        assert (result.usage.num_prompt_tokens, result.usage.num_output_tokens) == (len(ids), 10)
    stats = engine.stats()
    assert stats.num_output_tokens == 40 and stats.scheduler.num_free_blocks == 64 and not engine.has_requests


def test_one_parameter_set_for_each_prompt():
    engine = make_engine()
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    results = engine.generate(["ab", "cd"], params)
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 5]
    with pytest.raises(InvalidRequest, match="1 sampling parameters for 2 prompts"):
        engine.generate(["ab", "cd"], params[:1])


def test_the_pieces_of_a_stream_are_the_whole_text():
    engine = make_engine()
    engine.add_request("a", "hello", SamplingParams(max_tokens=12, ignore_eos=True))
    outputs = run(engine)[("a", 0)]
    assert len(outputs) == 12 and [o.is_last for o in outputs] == [False] * 11 + [True]
    assert "".join(o.delta.text for o in outputs) == letters(plain_answer(ToyTokenizer().encode("hello"), 12))


def test_a_stop_string_ends_an_answer_and_frees_its_blocks():
    prompt = ToyTokenizer().encode("hello")
    text = letters(plain_answer(prompt, 12))
    stop = text[4:7]
    engine = make_engine()
    (result,) = engine.generate(["hello"], SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,)))
    (output,) = result.outputs
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) == text.index(stop) + 3
    assert engine.stats().scheduler.num_free_blocks == 64


def test_n_answers_share_the_prompt_and_differ_by_their_random_numbers():
    engine = make_engine()
    params = SamplingParams(max_tokens=6, n=3, temperature=5.0, seed=1, ignore_eos=True)
    (result,) = engine.generate([[*range(8)]], params)
    answers = [o.token_ids for o in result.outputs]
    assert [o.index for o in result.outputs] == [0, 1, 2] and len(set(answers)) == 3
    assert result.usage.num_output_tokens == 18
    # The prompt has 8 tokens in 2 blocks: the second and third answer find the first block and compute the other.
    assert engine.stats().num_computed_tokens == 8 + 2 * 4 + 3 * 5
    alone = make_engine().generate(
        [[*range(8)]], SamplingParams(max_tokens=6, temperature=5.0, seed=1, ignore_eos=True)
    )
    assert alone[0].outputs[0].token_ids == answers[0]


@pytest.mark.parametrize("tokens", [1, 6])
def test_n_answers_end_also_where_the_first_has_one_token(tokens):
    engine = make_engine()
    (result,) = engine.generate(["hello"], SamplingParams(max_tokens=tokens, n=2, ignore_eos=True))
    assert [len(o.token_ids) for o in result.outputs] == [tokens, tokens]


def test_g21_temperature_zero_and_top_k_one_are_the_same():
    prompts = [[i, 2 * i, 7] for i in range(6)]
    greedy = make_engine().generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    top_k = make_engine().generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5, top_k=1))
    assert [r.outputs[0].token_ids for r in greedy] == [r.outputs[0].token_ids for r in top_k]


def test_sampled_answers_do_not_depend_on_batch_mates_or_preemption():
    params = [SamplingParams(max_tokens=14, temperature=3.0, seed=i, ignore_eos=True) for i in range(6)]
    prompts = [[i, i + 1, i + 2, i + 3, i + 4] for i in range(6)]
    alone = [make_engine().generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]
    small = make_engine(num_blocks=9, max_model_len=32)
    together = [r.outputs[0].token_ids for r in small.generate(prompts, params)]
    assert together == alone and small.stats().scheduler.num_preemptions > 0


def test_g23_prompt_logprobs_are_whole_and_the_same_the_second_time():
    engine = make_engine(max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    prompt = [*range(20)]
    first, second = (engine.generate([prompt], params)[0] for _ in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs and len(first.prompt_logprobs) == 19
    assert [p.token_id for p in first.prompt_logprobs] == prompt[1:]
    for position, logprobs in enumerate(first.prompt_logprobs):
        assert logprobs.top[0][0] == next_token(prompt[: position + 1])
        assert len(logprobs.top) == 2
    assert first.outputs[0].logprobs == second.outputs[0].logprobs and len(first.outputs[0].logprobs) == 3


def test_prompt_logprobs_survive_a_preemption():
    engine = make_engine(num_blocks=6, max_model_len=24)
    params = SamplingParams(max_tokens=12, prompt_logprobs=0, ignore_eos=True)
    results = engine.generate([[*range(7)], [*range(50, 57)]], params)
    assert engine.stats().scheduler.num_preemptions > 0
    assert all(len(r.prompt_logprobs) == 6 for r in results)


def test_n_answers_are_taken_whole_where_few_may_wait():
    engine = make_engine(max_waiting=1, max_num_seqs=1)
    (result,) = engine.generate(["hello"], SamplingParams(max_tokens=4, n=4, ignore_eos=True))
    assert [len(o.token_ids) for o in result.outputs] == [4] * 4


def test_n_answers_that_are_too_late_end_once_each():
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add_request("a", "hello", SamplingParams(max_tokens=50, n=3, ignore_eos=True), deadline_ms=10)
    engine.step()
    engine.step()
    clock.now_ns = 11_000_000
    last = engine.step()
    assert [o.index for o in last] == [0, 1, 2] and [o.is_last for o in last] == [False, False, True]
    assert not engine.has_requests


def test_abort_ends_all_answers_of_a_request_and_no_other():
    engine = make_engine()
    engine.add_request("a", "hello", SamplingParams(max_tokens=50, n=2, ignore_eos=True))
    engine.add_request("b", "world", SamplingParams(max_tokens=5, ignore_eos=True))
    for _ in range(2):
        engine.step()
    last = engine.abort("a")
    assert [o.delta.finish_reason for o in last] == [FinishReason.ABORT] * 2
    assert [o.is_last for o in last] == [False, True]
    assert engine.abort("a") == [] and engine.abort("nobody") == []
    outputs = run(engine)
    assert list(outputs) == [("b", 0)] and engine.stats().scheduler.num_free_blocks == 64


def test_a_request_that_is_too_late_ends_with_what_it_has():
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add_request("a", "hello", SamplingParams(max_tokens=50, ignore_eos=True), deadline_ms=10)
    engine.step()
    clock.now_ns = 11_000_000
    (last,) = engine.step()
    assert last.delta.finish_reason is FinishReason.DEADLINE and last.is_last
    assert last.usage.num_output_tokens == 1 and not engine.has_requests


def test_a_deadline_goes_with_its_request_and_not_with_the_id():
    clock = Clock()
    engine = make_engine(clock=clock)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.add_request("a", "hello", params, deadline_ms=10)
    engine.abort("a")
    engine.add_request("a", "hello", params, deadline_ms=20)
    engine.add_request("b", "world", params)
    clock.now_ns = 19_999_999
    assert all(o.delta.finish_reason is None for o in engine.step())
    clock.now_ns = 20_000_000
    reasons = [(o.request_id, o.delta.finish_reason) for o in engine.step()]
    assert reasons == [("a", FinishReason.DEADLINE), ("b", None)]
    assert run(engine)[("b", 0)][-1].delta.finish_reason is FinishReason.LENGTH


def test_deadlines_of_answers_that_came_in_time_are_not_kept():
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add_request("late", "hello", SamplingParams(max_tokens=100, ignore_eos=True), deadline_ms=1e6)
    for index in range(60):
        engine.add_request(f"r{index}", "hello", SamplingParams(max_tokens=1), deadline_ms=1e9)
        engine.step()
    assert len(engine._live._deadlines) <= 20
    clock.now_ns = 10**12
    assert [o.delta.finish_reason for o in engine.step() if o.request_id == "late"] == [FinishReason.DEADLINE]


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    clock = Clock()
    engine = make_engine(clock=clock)
    real = engine._runner.execute

    def execute(output):
        clock.now_ns += 1_000_000 * (10 + output.num_tokens)  # 10 ms a step and 1 ms a token
        return real(output)

    engine._runner.execute = execute
    for prompts in (["hello", "a"], ["b"]):  # steps of two sizes
        engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    # 5 tokens at once, then 9 more one by one: 15 + 9 x 11 = 114 ms.
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with pytest.raises(RequestRefused, match="in 100 ms, the answer can be there in 114 ms") as refused:
        engine.add_request("late", "world", params, deadline_ms=100)
    assert refused.value.code == "deadline" and not engine.has_requests
    engine.add_request("fine", "world", params, deadline_ms=120)
    assert len(run(engine)[("fine", 0)]) == 10


def test_a_row_of_nan_fails_its_request_and_no_other():
    engine = make_engine()
    real = engine._runner.execute

    def execute(output):
        result = real(output)
        rows = np.cumsum([0, *(r.num_logits for r in output.requests)])
        for scheduled, first in zip(output.requests, rows, strict=False):
            if scheduled.request_id == "0/bad" and scheduled.num_computed_tokens > 6:
                result.logits[first] = np.nan
        return result

    engine._runner.execute = execute
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.add_request("bad", "hello", params)
    engine.add_request("good", "world", params)
    outputs = run(engine)
    assert outputs[("bad", 0)][-1].delta.finish_reason is FinishReason.ERROR
    assert "nan" in outputs[("bad", 0)][-1].error
    assert len(outputs[("good", 0)]) == 8
    assert engine.stats().scheduler.num_free_blocks == 64


@pytest.mark.parametrize("position", [2, 18, 29])
def test_nan_in_the_logits_of_a_prompt_fails_its_request_and_no_other(position):
    """In the first chunk, in a later one, in the last row before the answer's."""
    engine = make_engine()
    real = engine._runner.execute

    def execute(output):
        result = real(output)
        first = 0
        for r in output.requests:
            row = first + position - (r.num_computed_tokens + len(r.token_ids) - r.num_logits)
            if r.request_id == "0/bad" and first <= row < first + r.num_logits:
                result.logits[row, 5] = np.nan
            first += r.num_logits
        return result

    engine._runner.execute = execute
    engine.add_request("bad", [1] * 31, SamplingParams(max_tokens=8, ignore_eos=True, prompt_logprobs=1))
    engine.add_request("good", "world", SamplingParams(max_tokens=8, ignore_eos=True))
    outputs = run(engine)
    assert [o.delta.finish_reason for o in outputs[("bad", 0)]] == [FinishReason.ERROR]
    assert "nan" in outputs[("bad", 0)][0].error
    assert sum(len(o.delta.token_ids) for o in outputs[("good", 0)]) == 8
    assert engine.stats().scheduler.num_free_blocks == 64


def test_an_error_before_the_first_token_ends_all_n_answers():
    engine = make_engine()
    engine._runner.execute = lambda output, real=engine._runner.execute: type(real(output))(
        np.full((output.num_logits, VOCAB_SIZE), np.nan, dtype=np.float32)
    )
    (result,) = engine.generate(["hello"], SamplingParams(n=3))
    assert [o.finish_reason for o in result.outputs] == ["error"] * 3 and not engine.has_requests


def test_wrong_requests_are_refused_by_name():
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=f"token id {VOCAB_SIZE}; allowed: 0 to {VOCAB_SIZE - 1}"):
        engine.add_request("a", [VOCAB_SIZE])
    with pytest.raises(InvalidRequest, match="logit_bias is 1000"):
        engine.add_request("a", "hello", SamplingParams(logit_bias={1000: 1.0}))
    with pytest.raises(RequestRefused, match="no tokens"):
        engine.add_request("a", "")
    engine.add_request("a", "hello")
    with pytest.raises(RequestRefused, match="'a' is in use"):
        engine.add_request("a", "hello")
    run(engine)
    assert len(engine.generate(["hello"])) == 1


@pytest.mark.parametrize("prompt", [[1.5, 2], [True, 2], ["a"], b"abc", None, 7, {"a": 1}, [np.array([1, 2])]])
def test_what_is_no_prompt_is_refused_before_a_step(prompt):
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=r"prompt is .*; allowed: ") as error:
        engine.add_request("a", prompt)
    assert error.value.param == "prompt" and not engine.has_requests


@pytest.mark.parametrize("prompt", [np.array([5, 6, 7]), [np.int64(5), np.int32(6), np.uint8(7)], range(5, 8)])
def test_integers_of_numpy_are_token_ids(prompt):
    (result,) = make_engine().generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    assert list(result.outputs[0].token_ids) == plain_answer([5, 6, 7], 3)
    assert [type(i) for i in result.prompt_token_ids] == [int] * 3


def test_a_text_alone_is_one_prompt_and_not_a_prompt_for_each_letter():
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    (result,) = make_engine().generate("hello", params)
    assert result.outputs == make_engine().generate(["hello"], params)[0].outputs


def test_a_token_of_the_tokenizer_that_the_model_does_not_have_is_refused():
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=r"token id 158, which its tokenizer has and the model has not"):
        engine.add_request("a", "ab\u00ff")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", 5),
        ("params", {"max_tokens": 3}),
        ("priority", "high"),
        ("priority", float("nan")),
        ("client", None),
        ("cache_salt", b"x"),
        ("deadline_ms", float("nan")),
        ("deadline_ms", float("inf")),
        ("deadline_ms", "5"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_by_name_and_leave_nothing_behind(name, value):
    engine = make_engine(policy="priority")
    engine.add_request("other", "hello", priority=1)
    with pytest.raises(InvalidRequest, match=f"{name} is ") as error:
        engine.add_request(**{"request_id": "a", "prompt": "hello", name: value})
    assert error.value.param == name
    assert set(run(engine)) == {("other", 0)} and not engine.scheduler.has_requests


def test_the_longest_timeout_of_triton_is_a_deadline():
    engine = make_engine()
    engine.add_request("a", "hello", deadline_ms=2**64 / 1e3)
    assert run(engine)["a", 0][-1].delta.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("first", ["a", "a/1", "1/a"])
def test_ids_of_users_never_meet_those_of_n_answers(first):
    """The second of n answers starts in a step: an id that is in use there would end all requests."""
    engine = make_engine()
    for request_id in sorted(["a", "a/1", "1/a"], key=lambda i: i != first):
        engine.add_request(request_id, "hello", SamplingParams(n=2 if request_id == "a" else 1))
    assert set(run(engine)) == {("a", 0), ("a", 1), ("a/1", 0), ("1/a", 0)}


def test_generate_does_not_swallow_the_outputs_of_other_requests():
    engine = make_engine()
    engine.add_request("mine", "hello")
    with pytest.raises(RequestRefused, match="1 requests are on their way"):
        engine.generate(["world"])
    assert set(run(engine)) == {("mine", 0)}


def test_parameters_that_are_neither_one_nor_a_list_are_refused():
    with pytest.raises(InvalidRequest, match=r"params is \{'max_tokens': 3\}; allowed: SamplingParams"):
        make_engine().generate(["hello"], {"max_tokens": 3})


def test_an_engine_that_was_closed_says_so():
    engine = make_engine()
    closed = []
    engine._runner.close = lambda: closed.append(True)
    engine.close()
    engine.close()
    assert closed == [True] and engine.step() == []
    with pytest.raises(RequestRefused, match="the engine is closed"):
        engine.generate(["hello"])


def test_an_end_token_beyond_the_models_vocabulary_is_no_stop_token():
    """min_tokens bans end tokens by their place in the logits; this one has none."""
    engine = make_engine()
    engine.tokenizer.eos_token_ids = frozenset([END, VOCAB_SIZE + 3])
    (result,) = engine.generate(["hello"], SamplingParams(min_tokens=4, max_tokens=4))
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", "8"),
        ("max_num_seqs", 8.5),
        ("max_model_len", True),
        ("max_num_batched_tokens", None),
        ("long_prefill_token_threshold", 0),
        ("max_waiting", -1),
        ("max_waiting", 1.5),
        ("enable_prefix_cache", "no"),
    ],
)
def test_limits_of_the_wrong_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}, "):
        SchedulerConfig(**{name: value})


def test_generate_computes_nothing_where_one_prompt_is_refused():
    engine = make_engine()
    with pytest.raises(RequestRefused):
        engine.generate(["hello", [1] * 500])
    assert not engine.has_requests and engine.stats().num_steps == 0


def test_a_salt_keeps_prefixes_apart():
    engine = make_engine()
    for salt, cached in (("", 0), ("", 4), ("x", 0), ("x", 4)):
        engine.add_request("a", [*range(8)], SamplingParams(max_tokens=1), cache_salt=salt)
        (output,) = run(engine)[("a", 0)]
        assert output.usage.num_cached_tokens == cached


def looping(engine, token_ns=100_000):
    """Makes the toy model repeat the token of eleven tokens ago, so that prompt lookup is right; a step takes 10 ms."""

    def execute(output, real=engine._runner.execute):
        result = real(output)
        engine._clock_ns.now_ns += 10_000_000 + token_ns * output.num_tokens
        row = 0
        for scheduled in output.requests:
            tokens = engine._live.sequences[scheduled.request_id].request.token_ids
            tokens = [*tokens[: scheduled.num_computed_tokens], *scheduled.token_ids]
            for end in range(len(tokens) - scheduled.num_logits, len(tokens)):
                result.logits[row] = 0.0
                result.logits[row, tokens[end - 10]] = 1.0
                row += 1
        return result

    engine._runner.execute = execute
    return engine


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_speculation_gives_the_tokens_of_plain_decoding_in_fewer_steps(temperature):
    prompts = [[*range(i, i + 11), *range(i, i + 4)] for i in range(3)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=3)
    plain = looping(make_engine(max_num_batched_tokens=64))
    fast = looping(make_engine(max_num_batched_tokens=64, num_draft_tokens=6))
    expected = [r.outputs[0].token_ids for r in plain.generate(prompts, params)]
    found = [r.outputs[0].token_ids for r in fast.generate(prompts, params)]
    if temperature == 0:
        assert found == expected
        assert fast.stats().num_steps < plain.stats().num_steps / 2
        assert fast.stats().acceptance_rate > 0.9
    assert fast.stats().scheduler.num_free_blocks == 64 and plain.stats().acceptance_rate is None


def test_drafts_that_are_wrong_change_no_token_and_are_soon_not_asked_for(monkeypatch):
    def propose(self, num_drafts):
        return {request_id: Draft((1, 2, 3)[:count]) for request_id, count in num_drafts.items()}

    monkeypatch.setattr(NgramProposer, "propose", propose)
    prompts = [[*range(i, i + 11), *range(i, i + 4)] for i in range(3)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain, fast = (
        looping(make_engine(max_num_batched_tokens=64, num_draft_tokens=n), token_ns=5_000_000) for n in (0, 3)
    )
    found = [[r.outputs[0].token_ids for r in engine.generate(prompts, params)] for engine in (plain, fast)]
    assert found[0] == found[1]
    assert 0 < fast.stats().num_draft_tokens < 60


def test_a_warm_up_changes_no_answer_and_no_counter():
    engine = make_engine()
    engine.warm_up()
    assert engine.stats() == make_engine().stats()
    (result,) = engine.generate(["hello"], SamplingParams(max_tokens=10, ignore_eos=True))
    assert list(result.outputs[0].token_ids) == plain_answer(ToyTokenizer().encode("hello"), 10)
