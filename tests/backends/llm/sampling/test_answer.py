"""Answer: text, reasons, usage and log probabilities of one answer, whatever the steps it came in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llm.engine.request import FinishReason
from backends.llm.sampling.answer import Answer, AnswerDelta, Usage
from backends.llm.sampling.logprobs import TokenLogprobs
from backends.llm.sampling.params import SamplingParams
from tests.backends.llm.sampling.tiny_tokenizers import byte_fallback, byte_level

BYTES, BPE = byte_fallback(), byte_level()
EOS = BYTES.library.token_to_id("<eos>")


def spelt(text: str) -> list[int]:
    """One token for each byte."""
    return [BYTES.library.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def delta(
    text: str, count: int, reason: FinishReason | None = None, stop: int | str | None = None
) -> tuple[object, ...]:
    return (text, count, reason, stop)


def shown(seen: AnswerDelta) -> tuple[object, ...]:
    return (seen.text, len(seen.token_ids), seen.finish_reason, seen.stop_reason)


def test_g13_a_stop_string_over_four_tokens_leaves_nothing() -> None:
    answer = Answer(SamplingParams(stop=("DEFGHIJ",)), BPE)
    steps = [answer.add(BPE.encode(piece)) for piece in ("DEF", "G", "HI", "J")]
    assert [step.text for step in steps] == ["", "", "", ""]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", FinishReason.STOP, "DEFGHIJ")


def test_g13_a_stop_string_inside_a_token_ends_the_answer() -> None:
    token_ids = BPE.encode("the")
    assert len(token_ids) == 1
    answer = Answer(SamplingParams(stop=("th",)), BPE)
    assert shown(answer.add(token_ids)) == delta("", 1, FinishReason.STOP, "th")


def test_g16_half_a_character_at_max_tokens_gives_no_text() -> None:
    answer = Answer(SamplingParams(max_tokens=1), BYTES)
    assert shown(answer.add(spelt("é")[:1], None, FinishReason.LENGTH)) == delta("", 1, FinishReason.LENGTH)
    assert answer.text == ""
    assert answer.usage(3, 2) == Usage(num_prompt_tokens=3, num_cached_tokens=2, num_output_tokens=1)


def test_g35_log_probabilities_are_there_when_asked_for_only() -> None:
    entries = [TokenLogprobs(token_id, -0.5, 1, ()) for token_id in spelt("ab")]
    silent = Answer(SamplingParams(), BYTES)
    assert silent.add(spelt("ab"), entries).logprobs is None
    assert silent.logprobs is None
    asked = Answer(SamplingParams(logprobs=0, stop=("a",)), BYTES)
    assert asked.add(spelt("ab"), entries).logprobs == (entries[0],)  # the answer ended with the first
    assert asked.logprobs == [entries[0]]
    assert asked.cumulative_logprob == -0.5


def test_the_text_of_a_stop_token_is_left_out() -> None:
    answer = Answer(SamplingParams(stop_token_ids=(spelt("x")[0],)), BYTES)
    assert shown(answer.add(spelt("ax"), None, FinishReason.STOP)) == delta("a", 2, FinishReason.STOP, spelt("x")[0])
    included = Answer(SamplingParams(stop_token_ids=(spelt("x")[0],), include_stop_str_in_output=True), BYTES)
    assert included.add(spelt("ax"), None, FinishReason.STOP).text == "ax"


@pytest.mark.parametrize("skip", [True, False])
def test_the_models_own_end_has_no_text_and_no_stop_reason(skip: bool) -> None:
    answer = Answer(SamplingParams(skip_special_tokens=skip), BYTES)
    assert shown(answer.add([*spelt("a"), EOS], None, FinishReason.STOP)) == delta("a", 2, FinishReason.STOP)


def test_an_ignored_end_token_is_shown_where_special_tokens_are() -> None:
    answer = Answer(SamplingParams(ignore_eos=True, skip_special_tokens=False), BYTES)
    assert answer.add([EOS, *spelt("a")]).text == "<eos>a"


def test_held_back_text_leaves_at_the_end() -> None:
    answer = Answer(SamplingParams(stop=("abc",)), BYTES)
    assert shown(answer.add(spelt("xab"))) == delta("x", 3)
    assert shown(answer.add([EOS], None, FinishReason.STOP)) == delta("ab", 1, FinishReason.STOP)
    assert answer.text == "xab"


def test_a_stop_string_beats_the_length_that_is_reached_with_it() -> None:
    answer = Answer(SamplingParams(stop=("b",)), BYTES)
    assert shown(answer.add(spelt("ab"), None, FinishReason.LENGTH)) == delta("a", 2, FinishReason.STOP, "b")


def test_tokens_behind_a_stop_string_are_not_part_of_the_answer() -> None:
    answer = Answer(SamplingParams(stop=("b",)), BYTES)
    assert shown(answer.add(spelt("abcd"), None, FinishReason.LENGTH)) == delta("a", 2, FinishReason.STOP, "b")
    assert answer.usage(1, 0).num_output_tokens == 2


def test_min_tokens_holds_for_stop_strings_too() -> None:
    """A stop token is possible from the token after them on, and so is the end of a stop string."""
    answer = Answer(SamplingParams(stop=("a",), min_tokens=3), BYTES)
    assert shown(answer.add(spelt("aaaa"))) == delta("aaa", 4, FinishReason.STOP, "a")
    across = Answer(SamplingParams(stop=("ab",), min_tokens=3), BYTES)
    assert shown(across.add(spelt("xxab"))) == delta("xx", 4, FinishReason.STOP, "ab")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.DEADLINE])
def test_an_end_from_outside_gives_what_was_held_back(reason: FinishReason) -> None:
    answer = Answer(SamplingParams(stop=("abc",)), BYTES)
    answer.add([*spelt("xab"), *spelt("é")[:1]])
    assert shown(answer.finish(reason)) == delta("ab", 0, reason)
    assert shown(answer.finish(FinishReason.ABORT)) == delta("", 0, reason)


def test_no_tokens_after_the_end() -> None:
    answer = Answer(SamplingParams(), BYTES)
    answer.finish(FinishReason.ABORT)
    with pytest.raises(AssertionError):
        answer.add(spelt("a"))


@given(
    st.text("abc é好", max_size=15),
    st.lists(st.text("abc é", min_size=1, max_size=3), max_size=3).map(tuple),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(0, 6),
    st.booleans(),
)
def test_steps_do_not_matter(text: str, stop: tuple[str, ...], cuts: list[int], min_tokens: int, include: bool) -> None:
    """One token a step and any bursts give the same text, tokens and reason; deltas add up to the text."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=100, include_stop_str_in_output=include)
    token_ids = spelt(text)
    edges = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    bursts = [token_ids[a:b] for a, b in itertools.pairwise(edges)]
    results = []
    for steps in ([[token_id] for token_id in token_ids], bursts):
        answer = Answer(params, BYTES)
        deltas = []
        for step in steps:
            if answer.finish_reason is None:
                deltas.append(answer.add(step))
        deltas.append(answer.finish(FinishReason.LENGTH))
        assert "".join(d.text for d in deltas) == answer.text
        assert [i for d in deltas for i in d.token_ids] == answer.token_ids
        results.append((answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
    assert results[0] == results[1]
    if not stop:
        assert results[0][0] == text
