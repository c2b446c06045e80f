"""StopMatcher against a search in the whole text, for any cutting into pieces."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llm.sampling.stop import StopMatcher


def run(pieces: list[str], stops: tuple[str, ...], *, include: bool = False) -> tuple[list[str], str | None]:
    """Returns what left after each piece (and at the end), and the stop string."""
    matcher = StopMatcher(stops, include_stop=include)
    chunks = [matcher.push(piece) for piece in pieces]
    return [*chunks, matcher.flush()], matcher.matched


def plain(text: str, stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of those; by searching every beginning of the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_g13_text_that_may_become_a_stop_is_held_back() -> None:
    assert run(["DEF", "G", "HI", "J"], ("DEFGHIJ",)) == (["", "", "", "", ""], "DEFGHIJ")


def test_g13_a_stop_inside_a_token_is_found() -> None:
    assert run(["Paris"], ("Pari",)) == (["", ""], "Pari")
    assert run(["to ", "Paris", " now"], ("Pari",)) == (["to ", "", "", ""], "Pari")


def test_g14_only_a_true_prefix_is_held_back() -> None:
    assert run(["a", "b", "x", "b,", "d", "b"], ("b,c",)) == (["a", "", "bx", "", "b,d", "", "b"], None)


def test_a_whole_stop_before_min_tokens_is_text_and_is_not_held_back() -> None:
    matcher = StopMatcher(("end",))
    assert matcher.push("the end", may_stop=False) == "the end"
    assert matcher.push(" en") == " "
    assert matcher.push("d.") == ""
    assert matcher.matched == "end"


def test_a_stop_that_ends_after_min_tokens_counts_from_its_beginning() -> None:
    matcher = StopMatcher(("end",))
    assert matcher.push("the e", may_stop=False) == "the "
    assert matcher.push("nd") == ""
    assert matcher.matched == "end"


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert run(["xabcd"], ("abcd", "bc")) == (["xa", ""], "bc")
    assert run(["xabc"], ("bc", "abc", "c")) == (["x", ""], "abc")
    assert run(["x", "a", "b", "d"], ("abc", "bd")) == (["x", "", "", "a", ""], "bd")


def test_with_the_stop_included_nothing_is_held_back_and_nothing_follows_it() -> None:
    assert run(["xa", "b", "cd", "e"], ("abc",), include=True) == (["xa", "b", "c", "", ""], "abc")


def test_without_stops_text_passes() -> None:
    assert run(["a", "", "b"], ()) == (["a", "", "b", ""], None)


TEXT = st.text("ab,c", max_size=25)
STOPS = st.lists(st.text("ab,c", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@given(TEXT, STOPS, st.lists(st.integers(0, 25), max_size=8), st.booleans())
def test_any_cutting_gives_the_text_and_stop_of_the_plain_search(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    chunks, matched = run(pieces, stops, include=include)
    assert ("".join(chunks), matched) == plain(text, stops, include=include)


@given(TEXT, STOPS)
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(character) for character in text)
    if matcher.matched is None:
        beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
        held = next(text[i:] for i in range(len(text) + 1) if text[i:] in beginnings)
        assert sent + held == text


@given(TEXT, STOPS, st.integers(0, 25))
def test_stops_that_end_within_min_tokens_do_not_count(text: str, stops: tuple[str, ...], first: int) -> None:
    matcher = StopMatcher(stops)
    sent = matcher.push(text[:first], may_stop=False) + matcher.push(text[first:]) + matcher.flush()
    ends = [(end, stop) for end in range(first + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not ends:
        assert (sent, matcher.matched) == (text, None)
    else:
        end = min(end for end, _ in ends)
        longest = max((stop for e, stop in ends if e == end), key=len)
        assert matcher.matched == longest
        assert sent == text[: end - len(longest)]


def test_a_seeded_wrong_matcher_is_caught() -> None:
    """Without the links to shorter states "ab" is missed in "aab"; the comparison above would see it."""
    matcher = StopMatcher(("aac", "ab"))
    assert matcher._automaton is not None
    fail = list(matcher._automaton.fail)
    text, _ = plain("aab", ("aac", "ab"))
    try:
        matcher._automaton.fail[:] = [0] * len(fail)
        assert "".join(matcher.push(character) for character in "aab") + matcher.flush() != text
    finally:
        matcher._automaton.fail[:] = fail


def test_the_work_for_a_token_does_not_grow_with_the_text_or_the_stops() -> None:
    def seconds(stops: tuple[str, ...], length: int) -> float:
        matcher = StopMatcher(stops)
        matcher.push("ab" * (length // 2))
        best = float("inf")
        for _ in range(20):
            begin = time.perf_counter()
            matcher.push("abab" * 50)
            best = min(best, time.perf_counter() - begin)
        return best

    few, many = ("a" * 100 + "c",), tuple("ab" * 100 + chr(ord("c") + i) for i in range(16))
    assert seconds(few, 100_000) < 10 * seconds(few, 100)
    assert seconds(many, 1000) < 10 * seconds(few, 1000)


@pytest.mark.parametrize("stop", ["é\u0301", "🙂🙃", "\n\n", "</s>"])
def test_any_characters_can_be_a_stop(stop: str) -> None:
    assert run([*("text" + stop + "more")], (stop,)) == (
        ["t", "e", "x", "t", *[""] * (len(stop) + 5)],
        stop,
    )
