"""The load on a fake language model, over real sockets: what is reported is what the server was told to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from statistics import median

import numpy as np
import pytest

from perf.arrivals import Arrivals, ClosedLoop, OpenLoop
from perf.errors import ServerUnreachable, UsageError
from perf.llm.lengths import Lengths
from perf.llm.measurement import LlmRun, LlmSettings, run_llm, summarise_llm
from perf.llm.metrics import ttft_ms
from perf.llm.prompts import PromptOptions, make_requests
from perf.llm.session import LlmQuestion, open_llm_session
from tests.perf.fake_llm_server import FakeLlm, Script, run_fake_llm

ENDPOINTS = ("grpc", "openai")
PROMPTS = PromptOptions(input_lengths=Lengths("fixed", 4), output_lengths=Lengths("uniform", 3, 9))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeLlm]:
    with run_fake_llm() as fake:
        yield fake


@pytest.fixture
def llm(server: FakeLlm) -> FakeLlm:
    """The one server, as new."""
    server.script, server.per_chunk_usage = (lambda number: Script()), True
    server.seen.clear()
    return server


def question(llm: FakeLlm, endpoint: str, prompts: PromptOptions = PROMPTS, streamed: bool = True) -> LlmQuestion:
    address = llm.grpc if endpoint == "grpc" else llm.http
    return LlmQuestion("fake", endpoint, address, prompts, streamed=streamed, timeout_s=30)


def run(
    llm: FakeLlm,
    endpoint: str,
    load: Arrivals | None = None,
    prompts: PromptOptions = PROMPTS,
    streamed: bool = True,
    **settings: object,
) -> LlmRun:
    session = open_llm_session(question(llm, endpoint, prompts, streamed))
    return run_llm(session.wire, session.payloads, load or ClosedLoop(1), LlmSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_times_are_the_servers(llm: FakeLlm, endpoint: str) -> None:
    """Each chunk is stamped after it left and before the next one did, but for what the machine delays."""
    llm.script = lambda number: Script(ttft_s=0.04 + 0.01 * (number % 3), itl_s=0.02, chunks=(2, 1, 3))
    found = run(llm, endpoint, request_count=6)
    prompts_ms, early = [], 0
    for outcome, seen in zip(found.outcomes, llm.seen, strict=True):
        assert outcome.answer.error is None
        stamps = [chunk.at_ns for chunk in outcome.answer.chunks]
        assert [chunk.tokens for chunk in outcome.answer.chunks] == [2, 1, 3]
        assert outcome.sent_ns <= seen.came_ns
        assert all(left <= stamp for left, stamp in zip(seen.left_ns, stamps, strict=True))
        early += sum(stamp < following for stamp, following in zip(stamps, seen.left_ns[1:], strict=False))
        prompts_ms.append(ttft_ms(outcome) - (seen.left_ns[0] - seen.came_ns) / 1e6)
    assert early >= 9  # of 12: a chunk is stamped when it comes, not with a later one
    # What the way costs is little beside what the server was told to wait.
    assert all(extra >= 0 for extra in prompts_ms) and median(prompts_ms) < 40
    measured = summarise_llm(found, ClosedLoop(1), LlmSettings())
    assert measured.ttft is not None and measured.ttft.low >= 40
    assert measured.tpot is not None and measured.itl is not None
    served = [(seen.left_ns[-1] - seen.left_ns[0]) / 1e6 / 5 for seen in llm.seen]
    assert measured.tpot.percentiles["p50"] == pytest.approx(median(served), rel=0.5)
    assert (measured.output_tokens, measured.itl.samples) == (36, 24)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_slow_servers_are_told_from_fast_ones(llm: FakeLlm, endpoint: str) -> None:
    """Twice the interval is about twice the TPOT, and no TTFT."""
    figures = []
    for itl_s in (0.02, 0.04):
        llm.script = lambda number, itl_s=itl_s: Script(0.02, itl_s, (1,) * 5)  # type: ignore[misc]
        measured = summarise_llm(run(llm, endpoint, request_count=4), ClosedLoop(1), LlmSettings())
        assert measured.tpot is not None and measured.ttft is not None
        figures.append((measured.tpot.percentiles["p50"], measured.ttft.percentiles["p50"]))
    (fast, _), (slow, _) = figures
    assert 1.3 < slow / fast < 3


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_h07_an_error_in_a_stream_is_a_failure(llm: FakeLlm, endpoint: str) -> None:
    """Every tenth request ends with an error after two good chunks; over SSE the status is 200."""
    llm.script = lambda number: Script(error="out of luck" if number % 10 == 9 else None)
    settings = LlmSettings(goodput_limits_ms={"ttft": 60_000.0})
    found = run(llm, endpoint, ClosedLoop(4), request_count=20)
    measured = summarise_llm(found, ClosedLoop(4), settings)
    assert (measured.completed, measured.failed, measured.output_tokens) == (18, 2, 72)
    assert [error.message for error in measured.errors] == ["out of luck"]
    assert measured.e2e is not None and measured.e2e.samples == 18
    assert measured.goodput_rps == pytest.approx(18 / measured.duration_s)


def test_kinds_of_our_errors_are_kept_apart(llm: FakeLlm) -> None:
    llm.script = lambda number: Script(chunks=(), error="[overloaded] 64 requests wait; allowed: 64")
    measured = summarise_llm(run(llm, "grpc", request_count=2), ClosedLoop(1), LlmSettings())
    assert [(error.kind, error.count) for error in measured.errors] == [("stream overloaded", 2)]


@pytest.mark.parametrize(("endpoint", "kind"), [("grpc", "grpc UNAVAILABLE"), ("openai", "http 503")])
def test_h07_refusals_are_failures_by_status(llm: FakeLlm, endpoint: str, kind: str) -> None:
    llm.script = lambda number: Script(status=503 if number < 3 else 200, error="full: 100 %" if number < 3 else None)
    measured = summarise_llm(run(llm, endpoint, request_count=5), ClosedLoop(1), LlmSettings())
    assert (measured.completed, measured.failed) == (2, 3)
    assert [(error.kind, error.message) for error in measured.errors] == [(kind, "full: 100 %")]


def test_prompts_larger_than_a_window_arrive_whole(llm: FakeLlm) -> None:
    """A quarter of a MB each, three at a time: HTTP/2 lets 64 KiB of them through before the server asks for more."""
    prompts = PromptOptions(input_lengths=Lengths("fixed", 60_000), token_ids=(0, 1 << 30))
    assert all(outcome.ok for outcome in run(llm, "grpc", ClosedLoop(3), prompts, request_count=6).outcomes)
    want = [request.prompt for request in islice(make_requests(prompts), 6)]
    got = [tuple(np.frombuffer(seen.request["input_ids"], np.int32).tolist()) for seen in llm.seen]
    assert sorted(got) == sorted(want)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_answer_that_takes_too_long_is_a_timeout_and_the_others_go_on(llm: FakeLlm, endpoint: str) -> None:
    llm.script = lambda number: Script(ttft_s=3600.0 if number == 1 else 0.0)
    session = open_llm_session(replace(question(llm, endpoint), timeout_s=0.5))
    found = run_llm(session.wire, session.payloads, ClosedLoop(2), LlmSettings(request_count=8))
    kinds = [outcome.answer.error.kind for outcome in found.outcomes if outcome.answer.error is not None]
    assert len(found.outcomes) == 8 and kinds == ["timeout"]


def test_tokens_are_those_of_the_usage_where_chunks_do_not_say(llm: FakeLlm) -> None:
    llm.per_chunk_usage = False
    llm.script = lambda number: Script(chunks=(4, 1, 1))
    measured = summarise_llm(run(llm, "openai", request_count=2), ClosedLoop(1), LlmSettings())
    assert measured.output_tokens == 12 and measured.estimated
    llm.per_chunk_usage = True
    assert not summarise_llm(run(llm, "openai", request_count=2), ClosedLoop(1), LlmSettings()).estimated


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_open_loop_sends_on_time(llm: FakeLlm, endpoint: str) -> None:
    """A server that needs half a second for an answer gets the next request before it has given it."""
    llm.script = lambda number: Script(ttft_s=0.5, chunks=(1, 1))
    load = OpenLoop(50, "poisson", seed=3)
    found = run(llm, endpoint, load, request_count=20)
    due = sorted(outcome.due_ns for outcome in found.outcomes)
    gaps = load.gaps_s()
    assert [after - before for before, after in pairwise(due)] == [round(next(gaps) * 1e9) for _ in range(19)]
    assert max(llm.seen[n].came_ns for n in range(5)) < min(left for seen in llm.seen for left in seen.left_ns)
    measured = summarise_llm(found, load, LlmSettings())
    assert measured.ttft is not None and measured.ttft.low >= 500
    assert measured.mode == "open" and measured.asked_rps == 50


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_asked_for_is_what_the_server_sees(llm: FakeLlm, endpoint: str) -> None:
    run(llm, endpoint, warmup_requests=2, request_count=5)
    assert len(llm.seen) == 7  # the warm-up is sent, and forgotten
    for seen in llm.seen:
        request = seen.request["sampling_parameters"] if endpoint == "grpc" else seen.request
        assert 3 <= request["max_tokens"] <= 9 and request["ignore_eos"] is True and request["temperature"] == 0
    if endpoint == "grpc":
        prompts = [seen.request["input_ids"] for seen in llm.seen]
        assert all(len(prompt) == 16 for prompt in prompts)
        assert all(seen.request["stream"] == seen.request["return_num_output_tokens"] == b"\x01" for seen in llm.seen)
    else:
        prompts = [tuple(seen.request["prompt"]) for seen in llm.seen]
        assert all(seen.request["stream_options"]["include_usage"] for seen in llm.seen)
    assert len(set(prompts)) == 7  # no prompt comes twice: no cache may answer for the model


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_same_seed_asks_the_same(llm: FakeLlm, endpoint: str) -> None:
    for _ in range(2):
        run(llm, endpoint, request_count=3)
    asked = [{key: value for key, value in seen.request.items() if key != "path"} for seen in llm.seen]
    assert asked[:3] == asked[3:] and asked[0] != asked[1]


def test_chat_is_sent_as_a_message(llm: FakeLlm) -> None:
    prompts = PromptOptions(kind="chat", input_lengths=Lengths("fixed", 5), ignore_eos=False)
    measured = summarise_llm(run(llm, "openai", prompts=prompts, request_count=1), ClosedLoop(1), LlmSettings())
    (seen,) = llm.seen
    assert seen.request["path"] == "/v1/chat/completions" and "ignore_eos" not in seen.request
    (message,) = seen.request["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 5
    assert (measured.completed, measured.output_tokens) == (1, 4)  # the chunk with the role is no content


def test_h11_whole_answers_have_no_ttft(llm: FakeLlm) -> None:
    found = run(llm, "openai", streamed=False, request_count=2)
    measured = summarise_llm(found, ClosedLoop(1), LlmSettings(streamed=False))
    assert (measured.completed, measured.output_tokens, measured.ttft) == (2, 8, None)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_duration_ends_and_waits_for_what_is_in_flight(llm: FakeLlm, endpoint: str) -> None:
    llm.script = lambda number: Script(itl_s=0.01, chunks=(1,) * 5)
    found = run(llm, endpoint, ClosedLoop(3), duration_s=0.3)
    assert found.end_ns - found.start_ns >= 0.3e9
    assert len(found.outcomes) == len(llm.seen) and all(outcome.ok for outcome in found.outcomes)
    late = [outcome for outcome in found.outcomes if outcome.ended_ns >= found.end_ns]
    assert len(late) <= 3
    measured = summarise_llm(found, ClosedLoop(3), LlmSettings())
    assert measured.completed == len(found.outcomes) - len(late) and measured.outstanding == len(late)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_server_and_no_model_are_told_apart(llm: FakeLlm, endpoint: str) -> None:
    asked = question(llm, endpoint)
    with pytest.raises(UsageError, match=r"no model 'nope' at .*; its models: fake, other"):
        open_llm_session(LlmQuestion("nope", endpoint, asked.address, PROMPTS))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match="compile serve"):
            open_llm_session(LlmQuestion("fake", endpoint, address, PROMPTS))


def test_chat_over_grpc_is_refused(llm: FakeLlm) -> None:
    with pytest.raises(UsageError, match="needs --endpoint openai"):
        open_llm_session(question(llm, "grpc", PromptOptions(kind="chat")))
