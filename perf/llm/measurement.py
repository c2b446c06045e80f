"""Measures one level of load on a language model: a run of requests, then their figures and what to beware of."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perf.arrivals import Arrivals, OpenLoop
from perf.errors import RequestFailed
from perf.llm.answers import Answer
from perf.llm.exchange import Exchange, Outcome, read_exchange
from perf.llm.metrics import Floats, defined, figures_of, goodput_rps, tokens_between
from perf.load_generator import Sender, connections_for, run_event_loop
from perf.measurement import ErrorCount
from perf.metrics import DEFAULT_PERCENTILES, LEAST_ACHIEVED, Latency, nearest_rank, summarise_latency, throughput_rps
from perf.pacing import MAX_OUTSTANDING, Pacer
from perf.records import ErrorKind

Attempt = Callable[[int | None], Awaitable[bool]]
BUSY_CLIENT = 0.5  # of a core: beyond it chunks wait for the client, and its own delay is in the figures


@dataclass(frozen=True)
class LlmSettings:
    """How to measure.

    Attributes:
        duration_s: length of the window; `request_count` goes before it.
        request_count: exactly so many requests, from the first to the end of the last.
        warmup_requests: sent and forgotten before each level.
        goodput_limits_ms: of `ttft`, `tpot`, `e2e`; empty for no goodput.
        repeats: how often to measure every level.
        streamed: tokens as they come.
        timeout_s: that one request may take.
    """

    duration_s: float = 30.0
    request_count: int | None = None
    warmup_requests: int = 0
    goodput_limits_ms: dict[str, float] = field(default_factory=dict)
    repeats: int = 1
    streamed: bool = True
    timeout_s: float = 300.0


@dataclass(frozen=True)
class LlmMeasurement:
    """One level, measured once. Rates are per second of `duration_s`; times in milliseconds.

    Attributes:
        completed, failed: requests that ended within the window.
        output_tokens: that came within the window, as the server counts them.
        input_tokens: of the completed requests; None where the server does not say, as `cached_tokens`.
        ttft, tpot, itl: None without streaming, or without a request that has them.
        asked_rps, achieved_rps, send_lag_p99_ms: of an open loop; None in a closed one.
        outstanding: requests sent and not ended when the window ended.
        estimated: the server did not count the tokens of each chunk; ITL takes them as spread evenly.
        client_us_per_token: processor time of this process for each output token.
        client_cores: the same for each second.
    """

    mode: str
    duration_s: float
    completed: int
    failed: int
    errors: tuple[ErrorCount, ...]
    requests_rps: float
    output_tokens: int
    output_tokens_per_s: float
    input_tokens: int | None
    cached_tokens: int | None
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    e2e: Latency | None
    goodput_rps: float | None
    asked_rps: float | None
    achieved_rps: float | None
    send_lag_p99_ms: float | None
    outstanding: int
    estimated: bool
    client_us_per_token: float | None
    client_cores: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class LlmRun:
    """What one run of the load left.

    Attributes:
        outcomes: all requests, also those that ended after the window.
        client_s: processor time of this process within the window.
    """

    outcomes: tuple[Outcome, ...]
    start_ns: int
    end_ns: int
    client_s: float


@dataclass(frozen=True)
class Wire:
    """How requests travel: makes a sender, not yet open, and reads what it received."""

    make_sender: Callable[[], Sender]
    read: Callable[[Any], Answer]


def measure_llm_level(
    wire: Wire, payloads: Iterator[bytes], arrivals: Arrivals, settings: LlmSettings
) -> LlmMeasurement:
    """Measure one level of load once. Blocks until the last request in flight has ended.

    Args:
        payloads: one for each request, without end; never the same twice, so that no cache answers.
    """
    return summarise_llm(run_llm(wire, payloads, arrivals, settings), arrivals, settings)


def run_llm(wire: Wire, payloads: Iterator[bytes], arrivals: Arrivals, settings: LlmSettings) -> LlmRun:
    """Send the load and return what came of it; nothing is read before the last request has ended."""
    exchanges: list[Exchange] = []

    async def main() -> tuple[int, int, float]:
        sender = wire.make_sender()
        await sender.open(connections_for(arrivals))
        try:
            if settings.warmup_requests:
                await Pacer(_attempts(sender, payloads, []), arrivals).run(settings.warmup_requests)
            pacer = Pacer(_attempts(sender, payloads, exchanges), arrivals, MAX_OUTSTANDING)
            start_ns, cpu_s = time.perf_counter_ns(), time.process_time()
            running = asyncio.create_task(pacer.run(settings.request_count))
            await asyncio.wait({running}, timeout=None if settings.request_count else settings.duration_s)
            end_ns, cpu_s = time.perf_counter_ns() + 1, time.process_time() - cpu_s
            pacer.stop()
            await running
            return start_ns, end_ns, cpu_s
        finally:
            await sender.close()

    start_ns, end_ns, client_s = run_event_loop(main, connections_for(arrivals))
    return LlmRun(tuple(read_exchange(one, wire.read) for one in exchanges), start_ns, end_ns, client_s)


def _attempts(sender: Sender, payloads: Iterator[bytes], exchanges: list[Exchange]) -> Attempt:
    async def attempt(due_ns: int | None) -> bool:
        payload = next(payloads)
        received: Any = None
        failure = None
        sent_ns = time.perf_counter_ns()
        try:
            received = await sender.send(payload)
        except RequestFailed as error:
            failure = error
        due_ns = sent_ns if due_ns is None else due_ns
        exchanges.append(Exchange(due_ns, sent_ns, time.perf_counter_ns(), received, failure))
        return failure is None and not received.failed

    return attempt


def summarise_llm(run: LlmRun, arrivals: Arrivals, settings: LlmSettings) -> LlmMeasurement:
    """The figures of the requests that ended within the window. Pure."""
    inside = [outcome for outcome in run.outcomes if run.start_ns <= outcome.ended_ns < run.end_ns]
    good = [outcome for outcome in inside if outcome.ok]
    duration_s = (run.end_ns - run.start_ns) / 1e9
    figures = figures_of(inside, settings.streamed)
    # A whole answer comes at once: the tokens of requests that ended inside are those of the window.
    tokens = tokens_between(run.outcomes, run.start_ns, run.end_ns)
    open_loop = isinstance(arrivals, OpenLoop)
    lag = np.sort([(outcome.sent_ns - outcome.due_ns) / 1e6 for outcome in inside]) if open_loop else np.empty(0)
    sent = sum(run.start_ns <= outcome.sent_ns < run.end_ns for outcome in run.outcomes)
    limits = settings.goodput_limits_ms
    measurement = LlmMeasurement(
        mode=arrivals.mode,
        duration_s=duration_s,
        completed=len(good),
        failed=len(inside) - len(good),
        errors=_errors(inside),
        requests_rps=throughput_rps(len(good), duration_s),
        output_tokens=tokens,
        output_tokens_per_s=throughput_rps(tokens, duration_s),
        input_tokens=_sum([outcome.answer.input_tokens for outcome in good]),
        cached_tokens=_sum([outcome.answer.cached_tokens for outcome in good]),
        ttft=_summary(figures.ttft),
        tpot=_summary(figures.tpot),
        itl=_summary(figures.itl),
        e2e=_summary(figures.e2e),
        goodput_rps=goodput_rps(inside, limits, duration_s) if limits else None,
        asked_rps=arrivals.rate_per_s if isinstance(arrivals, OpenLoop) else None,
        achieved_rps=throughput_rps(sent, duration_s) if open_loop else None,
        send_lag_p99_ms=nearest_rank(lag, 99) if len(lag) else None,
        outstanding=sum(outcome.sent_ns < run.end_ns <= outcome.ended_ns for outcome in run.outcomes),
        estimated=any(not outcome.answer.counted for outcome in good),
        client_us_per_token=run.client_s * 1e6 / tokens if tokens else None,
        client_cores=run.client_s / duration_s,
    )
    return replace(measurement, warnings=tuple(_warnings(measurement)))


def _summary(figures: Floats) -> Latency | None:
    return summarise_latency(defined(figures), DEFAULT_PERCENTILES)


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _errors(outcomes: list[Outcome]) -> tuple[ErrorCount, ...]:
    """How many failed in which way, the most frequent first, each with its first message."""
    first: dict[str, ErrorKind] = {}
    found: Counter[str] = Counter()
    for outcome in outcomes:
        if (error := outcome.answer.error) is not None:
            first.setdefault(error.kind, error)
            found[error.kind] += 1
    return tuple(ErrorCount(kind, count, first[kind].message) for kind, count in found.most_common())


def _warnings(one: LlmMeasurement) -> list[str]:
    """What a reader must know before using the figures."""
    found: list[str] = []
    total = one.completed + one.failed
    if not one.completed:
        found.append("every request failed" if total else "no request ended within the window; measure longer")
    if one.failed:
        kinds = "; ".join(f"{error.count} x {error.kind}: {error.message:.200}" for error in one.errors)
        found.append(f"{one.failed} of {total} requests failed, misses without a latency ({kinds})")
    if one.asked_rps is not None and one.achieved_rps is not None:
        if one.achieved_rps < LEAST_ACHIEVED * one.asked_rps:
            late = one.send_lag_p99_ms is not None and one.send_lag_p99_ms / 1e3 > 0.05 * one.duration_s
            cause = "the client fell behind" if late else "by chance of the arrivals; measure longer"
            found.append(f"asked for {one.asked_rps:g} requests/s, sent {one.achieved_rps:.2f}: below 95 %, {cause}")
        elif one.requests_rps < LEAST_ACHIEVED * one.achieved_rps and one.outstanding > one.failed:
            found.append(
                f"sent {one.achieved_rps:.2f} requests/s, the server completed {one.requests_rps:.2f}; "
                f"{one.outstanding} had not ended when the window did"
            )
    if one.client_cores > BUSY_CLIENT:
        found.append(
            f"the client used {one.client_cores:.2f} cores ({one.client_us_per_token or 0:.0f} us a token): "
            "its own delay is in the figures; use a second machine or fewer streams"
        )
    return found + _too_few(one)


def _too_few(one: LlmMeasurement) -> list[str]:
    """Says which percentiles have too few samples, in one line for those that have as many."""
    metrics: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    shown = {"TTFT": one.ttft, "TPOT": one.tpot, "ITL": one.itl}
    for name, latency in shown.items():
        if latency is not None and latency.unsupported:
            metrics.setdefault((latency.samples, latency.unsupported), []).append(name)
    return [
        f"{samples} samples are too few for {', '.join(percentiles)} of {' and '.join(names)}"
        for (samples, percentiles), names in metrics.items()
    ]
