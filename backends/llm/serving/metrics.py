"""EngineMetrics: the observer that counts what the engine does. It neither sends nor reads a clock.

What is counted when is vLLM's way (vllm/v1/metrics/stats.py), so that its dashboards show the same; each of the n
answers of a request counts as one of vLLM's requests.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

from backends.llm.engine.request import FinishReason
from backends.llm.engine.results import EngineStats, StepOutput
from backends.llm.sampling.params import SamplingParams
from backends.llm.serving import metric_families as m

REFUSALS = ("invalid_request", "context_length_exceeded", "overloaded", "deadline", "internal")


class Series(NamedTuple):
    """One number on the wire.

    Attributes:
        name: of the family, with `_bucket`, `_sum` or `_count` behind it for a part of a histogram.
        labels: beside those of the model.
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Histogram:
    """Counts of values by bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum")

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value; a bucket's bound belongs to it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def series(self) -> Iterator[tuple[Series, float]]:
        """Yields what Prometheus sees, the largest bucket first.

        Written in this order the buckets rise at every moment, whenever they are read.
        """
        cumulative = list(accumulate(self._counts))
        yield Series(f"{self._name}_count"), cumulative[-1]
        yield Series(f"{self._name}_sum"), self._sum
        for bound, count in zip(reversed((*self._bounds, inf)), reversed(cumulative), strict=True):
            yield Series(f"{self._name}_bucket", (("le", bound_text(bound)),)), count


def bound_text(bound: float) -> str:
    """Returns a bucket's bound as vLLM's library writes it: "0.5", "10.0", "2e+06", "+Inf"."""
    if bound == inf:
        return "+Inf"
    text = repr(float(bound))
    point = text.find(".")
    if point <= 6:
        return text
    return f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.") + f"e+{point - 1:02}"


@dataclass(slots=True)
class _Request:
    """What is known of a request while it lasts; lists have an entry for each of its answers.

    Attributes:
        num_open: answers that have not ended.
    """

    params: SamplingParams
    received_ns: int
    num_open: int
    first_ns: list[int | None]
    last_ns: list[int]
    num_tokens: list[int]


@dataclass
class EngineMetrics:
    """An EngineObserver. The engine's thread tells it, any thread may take a snapshot.

    Args:
        max_model_len: tokens of the longest request.
        stats: of the engine at the start.
        cache_info: what `vllm:cache_config_info` says.
    """

    max_model_len: int
    stats: EngineStats
    cache_info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._histograms = {f.name: Histogram(f.name, f.buckets) for f in m.histograms(self.max_model_len)}
        self._ended = {reason: 0 for reason in FinishReason}
        self._refused = dict.fromkeys(REFUSALS, 0)
        self._num_prompt = self._num_cached = self._num_generated = 0

    def added(self, request_id: str, params: SamplingParams, received_ns: int) -> None:
        """See EngineObserver."""
        with self._lock:
            self._requests[request_id] = _Request(
                params, received_ns, params.n, [None] * params.n, [received_ns] * params.n, [0] * params.n
            )

    def refused(self, kind: str) -> None:
        """See EngineObserver."""
        with self._lock:
            self._refused[kind] = self._refused.get(kind, 0) + 1

    def stepped(self, outputs: Sequence[StepOutput], stats: EngineStats, now_ns: int) -> None:
        """See EngineObserver."""
        with self._lock:
            if stats.num_steps > self.stats.num_steps:
                self._observe(m.ITERATION_TOKENS, stats.num_computed_tokens - self.stats.num_computed_tokens)
            self.stats = stats
            for output in outputs:
                request = self._requests.get(output.request_id)
                if request is None:
                    continue
                if output.delta.token_ids:
                    self._take_tokens(request, output, now_ns)
                if output.delta.finish_reason is not None:
                    self._end(request, output, now_ns)
                if output.is_last:
                    self._forget(output.request_id)

    def failed(self, now_ns: int) -> None:
        """See EngineObserver."""
        with self._lock:
            for request in self._requests.values():
                self._ended[FinishReason.ERROR] += request.num_open
                for _ in range(request.num_open):
                    self._observe(m.E2E_LATENCY, _seconds(request.received_ns, now_ns))
            self._requests.clear()

    def snapshot(self) -> dict[Series, float]:
        """Returns all numbers as they are now, in an order that is safe to write; a series never disappears."""
        with self._lock:
            numbers = dict(self._gauges())
            numbers.update(self._counters())
            for histogram in self._histograms.values():
                numbers.update(histogram.series())
            return numbers

    def _take_tokens(self, request: _Request, output: StepOutput, now_ns: int) -> None:
        index = output.index
        count = len(output.delta.token_ids)
        self._num_generated += count
        request.num_tokens[index] += count
        if request.first_ns[index] is None:
            request.first_ns[index] = now_ns
            self._num_prompt += output.usage.num_prompt_tokens
            self._num_cached += output.usage.num_cached_tokens
            self._observe(m.TIME_TO_FIRST_TOKEN, _seconds(request.received_ns, now_ns))
        else:
            self._observe(m.INTER_TOKEN_LATENCY, _seconds(request.last_ns[index], now_ns))
        request.last_ns[index] = now_ns

    def _end(self, request: _Request, output: StepOutput, now_ns: int) -> None:
        """Counts an answer; a phase that it did not come to is not counted with a time that nobody measured."""
        reason = output.delta.finish_reason
        assert reason is not None
        self._ended[reason] += 1
        request.num_open -= 1
        usage, first_ns, last_ns = output.usage, request.first_ns[output.index], request.last_ns[output.index]
        self._observe(m.E2E_LATENCY, _seconds(request.received_ns, now_ns))
        self._observe(m.REQUEST_PROMPT_TOKENS, usage.num_prompt_tokens)
        self._observe(m.REQUEST_GENERATION_TOKENS, usage.num_output_tokens)
        self._observe(m.REQUEST_PREFILL_KV_COMPUTED, usage.num_prompt_tokens - usage.num_cached_tokens)
        self._observe(m.REQUEST_NUM_PREEMPTIONS, output.num_preemptions)
        if request.params.max_tokens is not None:
            self._observe(m.REQUEST_MAX_TOKENS, request.params.max_tokens)
        scheduled_ns = output.scheduled_ns
        self._observe(m.QUEUE_TIME, _seconds(request.received_ns, now_ns if scheduled_ns is None else scheduled_ns))
        if scheduled_ns is None or first_ns is None:
            return
        self._observe(m.PREFILL_TIME, _seconds(scheduled_ns, first_ns))
        self._observe(m.INFERENCE_TIME, _seconds(scheduled_ns, last_ns))
        self._observe(m.DECODE_TIME, _seconds(first_ns, last_ns))
        if usage.num_output_tokens > 1:
            self._observe(m.TIME_PER_OUTPUT_TOKEN, _seconds(first_ns, last_ns) / (usage.num_output_tokens - 1))

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._observe(m.PARAMS_N, request.params.n)
        self._observe(m.REQUEST_MAX_GENERATION_TOKENS, max(request.num_tokens))

    def _observe(self, family: m.Family, value: float) -> None:
        self._histograms[family.name].observe(value)

    def _gauges(self) -> Iterator[tuple[Series, float]]:
        scheduler = self.stats.scheduler
        yield Series(m.NUM_RUNNING.name), scheduler.num_running
        yield Series(m.NUM_WAITING.name), scheduler.num_waiting
        yield Series(m.KV_CACHE_USAGE.name), scheduler.kv_cache_usage
        yield Series(m.CACHE_CONFIG_INFO.name, tuple(sorted(self.cache_info.items()))), 1
        yield _labelled(m.KV_BLOCKS, "used"), scheduler.num_blocks - scheduler.num_free_blocks
        yield _labelled(m.KV_BLOCKS, "free"), scheduler.num_free_blocks
        yield Series(m.PREFIX_CACHE_BLOCKS.name), scheduler.num_cached_blocks
        if self.stats.acceptance_rate is not None:
            yield Series(m.ACCEPTANCE_RATE.name), self.stats.acceptance_rate

    def _counters(self) -> Iterator[tuple[Series, float]]:
        stats = self.stats
        yield Series(m.PREFIX_CACHE_QUERIES.name), stats.scheduler.num_prefix_queries
        yield Series(m.PREFIX_CACHE_HITS.name), stats.scheduler.num_prefix_hits
        yield Series(m.NUM_PREEMPTIONS.name), stats.scheduler.num_preemptions
        yield Series(m.PROMPT_TOKENS.name), self._num_prompt
        yield Series(m.PROMPT_TOKENS_CACHED.name), self._num_cached
        yield Series(m.GENERATION_TOKENS.name), self._num_generated
        yield Series(m.NUM_DRAFTS.name), stats.num_drafts
        yield Series(m.NUM_DRAFT_TOKENS.name), stats.num_draft_tokens
        yield Series(m.NUM_ACCEPTED_TOKENS.name), stats.num_accepted_tokens
        yield Series(m.GRAMMAR_MASKS.name), stats.num_masks
        yield Series(m.GRAMMAR_MASK_SECONDS.name), stats.mask_seconds
        for reason, count in self._ended.items():
            yield _labelled(m.REQUEST_SUCCESS, reason.value), count
        for kind, count in self._refused.items():
            yield _labelled(m.REQUESTS_REFUSED, kind), count


def _labelled(family: m.Family, value: str) -> Series:
    return Series(family.name, ((family.label, value),))


def _seconds(start_ns: int, end_ns: int) -> float:
    return (end_ns - start_ns) / 1e9
