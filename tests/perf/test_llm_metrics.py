"""The figures of a language model, by hand: made-up times, exact values."""

from __future__ import annotations

import numpy as np
import pytest

from perf.arrivals import ClosedLoop, OpenLoop
from perf.llm.answers import NO_USAGE, Answer, Chunk, Piece, chunks_of
from perf.llm.exchange import Exchange, Outcome, read_exchange
from perf.llm.measurement import LlmMeasurement, LlmRun, LlmSettings, summarise_llm
from perf.llm.metrics import figures_of, itl_ms
from perf.llm.sse import SseReceived, read_sse
from perf.records import ErrorKind

MS = 1_000_000
BROKEN = ErrorKind("http 500", "broken")


def outcome(
    *chunks: tuple[float, int], due_ms: float = 0, late_ms: float = 0, error: ErrorKind | None = None
) -> Outcome:
    """A request with chunks of (ms, tokens); it ends with the last chunk."""
    made = tuple(Chunk(round(at * MS), tokens) for at, tokens in chunks)
    due, sent = round(due_ms * MS), round((due_ms + late_ms) * MS)
    return Outcome(due, sent, made[-1].at_ns if made else sent, Answer(made, 7, 3, error))


def summary(
    outcomes: list[Outcome], duration_ms: float = 1000, load: ClosedLoop | OpenLoop | None = None, **settings: object
) -> LlmMeasurement:
    run = LlmRun(tuple(outcomes), 0, round(duration_ms * MS), 0.01)
    return summarise_llm(run, load or ClosedLoop(1), LlmSettings(**settings))  # type: ignore[arg-type]


def test_h08_a_gap_is_divided_by_the_tokens_that_end_it() -> None:
    """Total 1.0 s, TTFT 0.2, 9 tokens, 5 of them in the first chunk: 0.2 s between tokens, and not 0.1."""
    figures = figures_of([outcome((200, 5), (1000, 4))])
    assert figures.itl.tolist() == [200, 200, 200, 200]
    assert figures.ttft.tolist() == [200] and figures.e2e.tolist() == [1000]
    assert figures.tpot.tolist() == [100]  # (1.0 - 0.2) / (9 - 1), which is another question


def test_itl_is_one_figure_for_each_later_token() -> None:
    assert itl_ms(outcome((10, 1), (14, 1), (24, 2)).answer) == [4, 5, 5]
    # A chunk without a whole token (half a character) lengthens the gap before the next.
    assert itl_ms(outcome((10, 1), (14, 0), (24, 2)).answer) == [7, 7]
    assert itl_ms(outcome((10, 3)).answer) == []


def test_tpot_of_one_token_is_undefined_and_no_zero() -> None:
    measured = summary([outcome((10, 1)), outcome((10, 1), (30, 1))])
    assert measured.tpot is not None and (measured.tpot.samples, measured.tpot.mean) == (1, 20)
    assert measured.ttft is not None and measured.ttft.samples == 2
    assert summary([outcome((10, 1))]).tpot is None


def test_h11_without_a_stream_there_is_no_first_token() -> None:
    measured = summary([outcome((50, 9))], streamed=False)
    assert (measured.ttft, measured.tpot, measured.itl) == (None, None, None)
    assert measured.e2e is not None and measured.e2e.mean == 50
    assert measured.output_tokens == 9


def test_h07_failures_are_counted_apart_and_miss_every_limit() -> None:
    outcomes = [outcome((10, 1), (20, 1))] * 9 + [outcome((1, 1), error=BROKEN)]
    measured = summary(outcomes, goodput_limits_ms={"ttft": 100.0, "tpot": 100.0})
    assert (measured.completed, measured.failed) == (9, 1)
    assert measured.ttft is not None and (measured.ttft.samples, measured.ttft.low) == (9, 10)
    assert measured.goodput_rps == measured.requests_rps == 9
    assert measured.output_tokens == 18  # the token of the failure is no output
    assert [(one.kind, one.count, one.message) for one in measured.errors] == [("http 500", 1, "broken")]
    assert any("1 of 10 requests failed" in warning for warning in measured.warnings)


def test_h16_goodput_is_requests_that_meet_all_limits_per_second() -> None:
    """5 requests, limits of TTFT 100 and E2E 800; one misses the second."""
    outcomes = [outcome((50, 1), (700, 1))] * 4 + [outcome((50, 1), (900, 1))]
    assert summary(outcomes, 2000, goodput_limits_ms={"ttft": 100.0, "e2e": 800.0}).goodput_rps == 2
    # An answer of one token has no TPOT to miss.
    assert summary([outcome((50, 1))], goodput_limits_ms={"tpot": 1.0}).goodput_rps == 1


def test_latency_counts_from_when_a_request_was_due() -> None:
    measured = summary([outcome((130, 1), (140, 1), due_ms=0, late_ms=100)], load=OpenLoop(10, "poisson"))
    assert measured.ttft is not None and measured.ttft.mean == 130
    assert measured.send_lag_p99_ms == 100


def test_h06_tokens_are_those_that_came_within_the_window() -> None:
    """Also of a request that ended after it, whose latency is left out."""
    measured = summary([outcome((10, 1), (400, 2)), outcome((600, 3), (990, 1), (1200, 5))])
    assert (measured.completed, measured.output_tokens, measured.outstanding) == (1, 7, 1)
    assert measured.output_tokens_per_s == 7
    assert measured.input_tokens == 7 and measured.cached_tokens == 3


def test_h13_a_rate_that_was_not_reached_is_said() -> None:
    measured = summary([outcome((10, 1))] * 4, load=OpenLoop(10, "constant"))
    assert (measured.asked_rps, measured.achieved_rps) == (10, 4)
    assert any("asked for 10 requests/s, sent 4.00: below 95 %" in warning for warning in measured.warnings)


def test_h14_percentiles_are_of_pooled_values_and_say_when_they_are_too_few() -> None:
    measured = summary([outcome((1, 1))] * 90 + [outcome((100, 1))] * 10)
    assert measured.ttft is not None
    assert (measured.ttft.percentiles["p90"], measured.ttft.percentiles["p99"]) == (1, 100)
    assert measured.ttft.unsupported == ()
    few = summary([outcome((1, 1))] * 99)
    assert few.ttft is not None and few.ttft.unsupported == ("p99",)
    assert any("99 samples are too few for p99 of TTFT" in warning for warning in few.warnings)


def test_nothing_that_ended_is_said() -> None:
    measured = summary([outcome((2000, 1))])
    assert measured.e2e is None and measured.client_us_per_token is None
    assert "no request ended within the window; measure longer" in measured.warnings


def test_a_busy_client_is_said() -> None:
    run = LlmRun((outcome((10, 1)),), 0, 1000 * MS, 0.6)
    measured = summarise_llm(run, ClosedLoop(1), LlmSettings())
    assert measured.client_cores == pytest.approx(0.6, rel=1e-6)
    assert measured.client_us_per_token == 600_000
    assert any("the client used 0.60 cores" in warning for warning in measured.warnings)


@pytest.mark.parametrize(
    ("pieces", "tokens", "counted"),
    [
        # Every message counts: what is new in each, and messages that bring nothing are no chunks.
        ([(True, 1), (True, 3), (False, 3)], [1, 2], True),
        # A token that is no whole character yet is a chunk, too.
        ([(False, 1), (True, 2)], [1, 1], True),
        # Text that was held back comes without a token of its own.
        ([(True, 2), (True, 2)], [2, 0], True),
        # Only the end counts, and there are as many pieces: one each.
        ([(True, None), (True, None), (True, None), (False, 3)], [1, 1, 1], True),
        # There are not: spread evenly.
        ([(True, None), (True, None), (False, 5)], [2, 3], False),
        ([(True, None), (True, None), (True, None), (False, 2)], [0, 1, 1], False),
        # A model that says nothing but special tokens has no text at all.
        ([(False, 1), (False, 2)], [1, 1], True),
    ],
)
def test_tokens_of_chunks(pieces: list[tuple[bool, int | None]], tokens: list[int], counted: bool) -> None:
    found = chunks_of([Piece(index, text, total) for index, (text, total) in enumerate(pieces)])
    assert found is not None
    assert ([chunk.tokens for chunk in found[0]], found[1]) == (tokens, counted)


def test_chunks_are_never_counted_for_tokens() -> None:
    assert chunks_of([Piece(0, True, None)]) is None
    assert "chunks are not counted" in NO_USAGE.message


def test_figures_keep_their_order() -> None:
    figures = figures_of([outcome((30, 1)), outcome((10, 2), (20, 1)), outcome((1, 1), error=BROKEN)])
    assert figures.ttft.tolist() == [30, 10]
    assert np.isnan(figures.tpot[0]) and figures.tpot[1] == 5


def received_events(*events: str) -> SseReceived:
    """A stream of server-sent events that came in one piece."""
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    return SseReceived(head + body, len(head), [len(head) + len(body)], [MS])


@pytest.mark.parametrize("event", ["7", "[]", '{"choices": [3]}', '{"usage": {"completion_tokens": "many"}}', "null"])
def test_h07_an_answer_that_cannot_be_read_fails_its_request_alone(event: str) -> None:
    found = read_exchange(Exchange(0, 0, MS, received_events(event, "[DONE]"), None), read_sse)
    assert found.answer.error is not None and found.answer.error.kind in ("bad answer", "no usage")


def test_usage_may_come_before_the_last_event() -> None:
    said = '{"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}'
    text = '{"error": null, "choices": [{"delta": {"content": "a"}}], "usage": null}'
    found = read_sse(received_events(text, text, f'{{"choices": [], "usage": {said}}}', '{"choices": []}', "[DONE]"))
    assert (found.error, found.output_tokens, found.input_tokens, found.cached_tokens) == (None, 2, 5, 4)
