"""EngineMetrics: what is counted when, on the toy engine and a clock by hand; names and buckets as vLLM has them."""

from __future__ import annotations

import math

import prometheus_client
import pytest
from prometheus_client.utils import floatToGoString

from backends.llm import SamplingParams
from backends.llm.sampling.ngram import NgramProposer
from backends.llm.sampling.proposer import Draft
from backends.llm.serving import metric_families
from backends.llm.serving.metrics import EngineMetrics, Histogram, Series, bound_text
from tests.backends.llm.engine.test_engine import Clock, make_engine

MS = 1_000_000


class Watched:
    """A toy engine whose steps take 10 ms each and are told to its metrics, as the engine's thread does."""

    def __init__(self, **config):
        self.clock = Clock()
        self.engine = make_engine(clock=self.clock, **config)
        execute = self.engine._runner.execute

        def execute_10_ms(output):
            self.clock.now_ns += 10 * MS
            return execute(output)

        self.engine._runner.execute = execute_10_ms
        self.metrics = EngineMetrics(self.engine.scheduler.max_model_len, self.engine.stats())

    def add(self, request_id, prompt, received_ns=None, **params):
        params = SamplingParams(ignore_eos=True, **params)
        self.engine.add_request(request_id, prompt, params)
        self.metrics.added(request_id, params, self.clock.now_ns if received_ns is None else received_ns)

    def step(self):
        outputs = self.engine.step()
        self.metrics.stepped(outputs, self.engine.stats(), self.clock.now_ns)

    def run(self):
        while self.engine.has_requests:
            self.step()

    def value(self, name, **labels):
        return self.metrics.snapshot()[Series(name, tuple(labels.items()))]

    def histogram(self, name):
        """Returns (count, sum) of a histogram."""
        return self.value(f"{name}_count"), pytest.approx(self.value(f"{name}_sum"))


def test_one_answer_from_its_arrival_to_its_end() -> None:
    watched = Watched()
    watched.clock.now_ns = 5 * MS
    # It waited for the engine for 5 ms. A prompt of 20 tokens takes two steps of 16, so the first token comes at 25 ms,
    # the other two at 35 and 45.
    watched.add("a", list(range(20)), received_ns=0, max_tokens=3)
    watched.run()

    assert watched.histogram("vllm:time_to_first_token_seconds") == (1, 0.025)
    assert watched.histogram("vllm:inter_token_latency_seconds") == (2, 0.020)
    assert watched.histogram("vllm:request_time_per_output_token_seconds") == (1, 0.010)
    assert watched.histogram("vllm:e2e_request_latency_seconds") == (1, 0.045)
    assert watched.histogram("vllm:request_queue_time_seconds") == (1, 0.005)
    assert watched.histogram("vllm:request_prefill_time_seconds") == (1, 0.020)
    assert watched.histogram("vllm:request_decode_time_seconds") == (1, 0.020)
    assert watched.histogram("vllm:request_inference_time_seconds") == (1, 0.040)
    assert watched.histogram("vllm:request_prompt_tokens") == (1, 20)
    assert watched.histogram("vllm:request_generation_tokens") == (1, 3)
    assert watched.histogram("vllm:request_params_max_tokens") == (1, 3)
    assert watched.histogram("vllm:request_params_n") == (1, 1)
    assert watched.histogram("vllm:request_num_preemptions") == (1, 0)
    assert watched.histogram("vllm:iteration_tokens_total") == (4, 22), "16 + 4 of the prompt, then two decodes"
    assert watched.value("vllm:prompt_tokens_total") == 20
    assert watched.value("vllm:generation_tokens_total") == 3
    assert watched.value("vllm:request_success_total", finished_reason="length") == 1
    assert watched.value("vllm:inter_token_latency_seconds_bucket", le="0.01") == 2, "a bound belongs to its bucket"


def test_a_second_prompt_finds_the_first_ones_prefix() -> None:
    watched = Watched()
    for request_id in ("first", "second"):
        watched.add(request_id, list(range(10)), max_tokens=1)
        watched.run()
    assert watched.value("vllm:prefix_cache_queries_total") == 20
    assert watched.value("vllm:prefix_cache_hits_total") == 8, "two full blocks of 4"
    assert watched.value("vllm:prompt_tokens_total") == 20
    assert watched.value("vllm:prompt_tokens_cached_total") == 8
    assert watched.histogram("vllm:request_prefill_kv_computed_tokens") == (2, 12)
    assert watched.value("modelkiln:prefix_cache_blocks") == 2


def test_each_of_n_answers_counts_as_a_request_of_its_own() -> None:
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=2, n=3)
    watched.run()
    assert watched.value("vllm:request_success_total", finished_reason="length") == 3
    assert watched.histogram("vllm:time_to_first_token_seconds")[0] == 3
    assert watched.histogram("vllm:request_params_n") == (1, 3)
    assert watched.histogram("vllm:request_max_num_generation_tokens") == (1, 2)
    assert watched.value("vllm:prompt_tokens_total") == 9


def test_h18_ten_waiting_requests_are_a_gauge_of_their_own() -> None:
    watched = Watched(max_num_seqs=2)
    for number in range(12):
        watched.add(f"r{number}", [number + 1, 5], max_tokens=4)
    watched.step()
    assert watched.value("vllm:num_requests_waiting") == 10
    assert watched.value("vllm:num_requests_running") == 2
    assert sum(v for s, v in watched.metrics.snapshot().items() if s.name == "vllm:request_success_total") == 0
    watched.run()
    assert watched.value("vllm:num_requests_waiting") == 0
    assert watched.value("vllm:num_requests_running") == 0
    assert watched.value("vllm:request_success_total", finished_reason="length") == 12


def test_blocks_in_use_and_free() -> None:
    watched = Watched(num_blocks=10)
    watched.add("a", list(range(9)), max_tokens=8)
    watched.step()
    assert watched.value("modelkiln:kv_blocks", state="used") == 3
    assert watched.value("modelkiln:kv_blocks", state="free") == 7
    assert watched.value("vllm:kv_cache_usage_perc") == pytest.approx(0.3)


def test_an_abort_before_the_first_step_counts_only_what_happened() -> None:
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=4)
    outputs = watched.engine.abort("a")
    watched.metrics.stepped(outputs, watched.engine.stats(), 30 * MS)
    assert watched.value("vllm:request_success_total", finished_reason="abort") == 1
    assert watched.histogram("vllm:request_queue_time_seconds") == (1, 0.030)
    assert watched.histogram("vllm:e2e_request_latency_seconds") == (1, 0.030)
    for phase in ("prefill", "decode", "inference"):
        assert watched.histogram(f"vllm:request_{phase}_time_seconds")[0] == 0
    assert watched.histogram("vllm:request_time_per_output_token_seconds")[0] == 0
    assert watched.histogram("vllm:iteration_tokens_total")[0] == 0, "an abort is no step"


def test_preemptions_are_counted_for_the_engine_and_for_the_answer() -> None:
    watched = Watched(num_blocks=8)
    watched.add("a", list(range(12)), max_tokens=12)
    watched.add("b", list(range(50, 58)), max_tokens=12)
    watched.run()
    preempted = watched.value("vllm:num_preemptions_total")
    assert preempted >= 1
    assert watched.histogram("vllm:request_num_preemptions") == (2, preempted)
    assert watched.histogram("vllm:request_queue_time_seconds")[0] == 2, "waiting again is not queueing again"


def test_drafts_and_their_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(self, num_drafts):
        return {request_id: Draft((1, 2, 3)[:count]) for request_id, count in num_drafts.items() if count}

    monkeypatch.setattr(NgramProposer, "propose", propose)
    watched = Watched(num_draft_tokens=3)
    assert Series("modelkiln:spec_decode_acceptance_rate") not in watched.metrics.snapshot(), "nothing is known yet"
    watched.add("a", [1, 2, 3], max_tokens=60)
    watched.run()
    stats = watched.engine.stats()
    assert stats.num_draft_tokens > stats.num_drafts > 0
    assert watched.value("vllm:spec_decode_num_drafts_total") == stats.num_drafts
    assert watched.value("vllm:spec_decode_num_draft_tokens_total") == stats.num_draft_tokens
    assert watched.value("vllm:spec_decode_num_accepted_tokens_total") == stats.num_accepted_tokens
    rate = stats.num_accepted_tokens / stats.num_draft_tokens
    assert watched.value("modelkiln:spec_decode_acceptance_rate") == rate


def test_when_the_engine_fails_every_answer_has_ended_with_an_error() -> None:
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=50, n=2)
    watched.add("b", [4, 5], max_tokens=50)
    watched.step()
    watched.metrics.failed(watched.clock.now_ns)
    assert watched.value("vllm:request_success_total", finished_reason="error") == 3
    watched.metrics.failed(watched.clock.now_ns)
    assert watched.value("vllm:request_success_total", finished_reason="error") == 3, "each ends once"


def test_refusals_by_kind() -> None:
    watched = Watched()
    watched.metrics.refused("overloaded")
    watched.metrics.refused("overloaded")
    assert watched.value("modelkiln:requests_refused_total", reason="overloaded") == 2
    assert watched.value("modelkiln:requests_refused_total", reason="deadline") == 0


def test_nothing_is_kept_of_requests_that_ended() -> None:
    watched = Watched()
    for number in range(20):
        watched.add(f"r{number}", [number + 1, 5], max_tokens=2, n=1 + number % 2)
    watched.engine.abort("r3")  # whoever aborts may not tell: the next step's outputs know nothing of it
    watched.run()
    assert set(watched.metrics._requests) == {"r3"}
    watched.metrics.stepped([], watched.engine.stats(), 0)


@pytest.mark.parametrize("value", [0.001, 0.3, 1, 10, 7680.0, 50_000, 500_000, 1_000_000, 2e6, 12_500_000, math.inf])
def test_bounds_are_written_as_vllms_library_writes_them(value: float) -> None:
    assert bound_text(value) == floatToGoString(value)


def test_a_histogram_has_the_lines_of_vllms_library() -> None:
    values = [0.0005, 0.001, 0.3, 0.3, 9.9, 5000.0]
    theirs = prometheus_client.Histogram(
        "vllm:time_to_first_token_seconds",
        "",
        buckets=metric_families.TIME_TO_FIRST_TOKEN_BUCKETS,
        registry=prometheus_client.CollectorRegistry(),
    )
    ours = Histogram("vllm:time_to_first_token_seconds", metric_families.TIME_TO_FIRST_TOKEN_BUCKETS)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    expected = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in theirs.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert {(series.name, series.labels): value for series, value in ours.series()} == expected


def test_the_largest_bucket_is_written_first() -> None:
    histogram = Histogram("h", (1, 2))
    before = dict(histogram.series())
    histogram.observe(0.5)
    # Someone who reads after any number of these writes sees buckets that rise with le.
    seen = dict(before)
    for series, value in histogram.series():
        seen[series] = value
        buckets = [seen[Series("h_bucket", (("le", le),))] for le in ("1.0", "2.0", "+Inf")]
        assert buckets == sorted(buckets)
    assert buckets == [1, 1, 1]


def test_token_buckets_end_with_the_longest_request() -> None:
    assert metric_families.request_tokens_buckets(128) == (1, 2, 5, 10, 20, 50, 100)
    assert metric_families.request_tokens_buckets(200) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert metric_families.request_tokens_buckets(1) == (1,)
