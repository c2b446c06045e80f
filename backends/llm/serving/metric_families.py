"""The metrics of a served language model, as data: vLLM's names, labels and buckets, and our own for what it lacks.

Names are those on the wire. vLLM declares `vllm:prompt_tokens`, and its library appends `_total` to each counter;
Triton appends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Family:
    """One metric.

    Attributes:
        label: the one label that it has beside those of the model, or "".
        buckets: upper bounds of a histogram, rising, without the infinite one.
    """

    name: str
    kind: Kind
    help: str
    label: str = ""
    buckets: tuple[float, ...] = ()


# vllm/v1/metrics/buckets.py of vLLM 0.32.
REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
ITERATION_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_PARAMS_N_BUCKETS = (1, 2, 5, 10, 20)
REQUEST_NUM_PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


def request_tokens_buckets(max_model_len: int) -> tuple[float, ...]:
    """Returns 1, 2, 5, 10, 20, 50, ... up to the longest request."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(max_model_len))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)


def _counter(name: str, text: str, label: str = "") -> Family:
    return Family(name, "counter", text, label)


def _gauge(name: str, text: str, label: str = "") -> Family:
    return Family(name, "gauge", text, label)


def _seconds(name: str, text: str, buckets: tuple[float, ...] = REQUEST_LATENCY_BUCKETS) -> Family:
    return Family(name, "histogram", text, buckets=buckets)


NUM_RUNNING = _gauge("vllm:num_requests_running", "Answers that the engine computes.")
NUM_WAITING = _gauge("vllm:num_requests_waiting", "Answers that wait for a place in a step.")
KV_CACHE_USAGE = _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that answers hold, 0 to 1.")
CACHE_CONFIG_INFO = _gauge("vllm:cache_config_info", "The KV cache, in labels; always 1.")
KV_BLOCKS = _gauge("modelkiln:kv_blocks", "Blocks of the KV cache: used by answers, or free.", "state")
PREFIX_CACHE_BLOCKS = _gauge("modelkiln:prefix_cache_blocks", "Blocks, used or free, that equal prompts find.")
ACCEPTANCE_RATE = _gauge("modelkiln:spec_decode_acceptance_rate", "Share of draft tokens that were accepted.")

PREFIX_CACHE_QUERIES = _counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")
PREFIX_CACHE_HITS = _counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
NUM_PREEMPTIONS = _counter("vllm:num_preemptions_total", "Preemptions.")
PROMPT_TOKENS = _counter("vllm:prompt_tokens_total", "Prompt tokens of answers that have begun, cached ones included.")
PROMPT_TOKENS_CACHED = _counter("vllm:prompt_tokens_cached_total", "Those of them that came from the prefix cache.")
GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "Tokens of answers.")
REQUEST_SUCCESS = _counter("vllm:request_success_total", "Answers that have ended, by reason.", "finished_reason")
NUM_DRAFTS = _counter("vllm:spec_decode_num_drafts_total", "Drafts that were verified.")
NUM_DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified.")
NUM_ACCEPTED_TOKENS = _counter("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted.")
GRAMMAR_MASKS = _counter("modelkiln:grammar_masks_total", "Rows of logits that a grammar masked.")
GRAMMAR_MASK_SECONDS = _counter("modelkiln:grammar_mask_seconds_total", "Time that computing the masks took.")
REQUESTS_REFUSED = _counter("modelkiln:requests_refused_total", "Requests refused, by the error's kind.", "reason")

TIME_TO_FIRST_TOKEN = _seconds(
    "vllm:time_to_first_token_seconds", "From the request to the answer's first token.", TIME_TO_FIRST_TOKEN_BUCKETS
)
INTER_TOKEN_LATENCY = _seconds(
    "vllm:inter_token_latency_seconds", "Between the steps that gave an answer tokens.", INTER_TOKEN_LATENCY_BUCKETS
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "vllm:request_time_per_output_token_seconds",
    "Mean time of an answer's tokens after its first.",
    INTER_TOKEN_LATENCY_BUCKETS,
)
E2E_LATENCY = _seconds("vllm:e2e_request_latency_seconds", "From the request to the answer's end.")
QUEUE_TIME = _seconds("vllm:request_queue_time_seconds", "From the request to the answer's first step.")
PREFILL_TIME = _seconds("vllm:request_prefill_time_seconds", "From an answer's first step to its first token.")
DECODE_TIME = _seconds("vllm:request_decode_time_seconds", "From an answer's first token to its last.")
INFERENCE_TIME = _seconds("vllm:request_inference_time_seconds", "From an answer's first step to its last token.")
ITERATION_TOKENS = Family(
    "vllm:iteration_tokens_total", "histogram", "Tokens that a step computed.", buckets=ITERATION_TOKENS_BUCKETS
)
PARAMS_N = Family("vllm:request_params_n", "histogram", "Answers asked for.", buckets=REQUEST_PARAMS_N_BUCKETS)
REQUEST_NUM_PREEMPTIONS = Family(
    "vllm:request_num_preemptions",
    "histogram",
    "How often an answer was preempted.",
    buckets=REQUEST_NUM_PREEMPTIONS_BUCKETS,
)

# The histograms of tokens end where the longest request does; their buckets are set when the model is known.
REQUEST_PROMPT_TOKENS = Family("vllm:request_prompt_tokens", "histogram", "Prompt tokens of an answer.")
REQUEST_GENERATION_TOKENS = Family("vllm:request_generation_tokens", "histogram", "Tokens of an answer.")
REQUEST_MAX_GENERATION_TOKENS = Family(
    "vllm:request_max_num_generation_tokens", "histogram", "Tokens of a request's longest answer."
)
REQUEST_MAX_TOKENS = Family("vllm:request_params_max_tokens", "histogram", "Tokens of an answer that a request allows.")
REQUEST_PREFILL_KV_COMPUTED = Family(
    "vllm:request_prefill_kv_computed_tokens", "histogram", "Prompt tokens of an answer that were not cached."
)

GAUGES = (NUM_RUNNING, NUM_WAITING, KV_CACHE_USAGE, CACHE_CONFIG_INFO, KV_BLOCKS, PREFIX_CACHE_BLOCKS, ACCEPTANCE_RATE)
COUNTERS = (
    *(PREFIX_CACHE_QUERIES, PREFIX_CACHE_HITS, NUM_PREEMPTIONS, PROMPT_TOKENS, PROMPT_TOKENS_CACHED, GENERATION_TOKENS),
    *(REQUEST_SUCCESS, REQUESTS_REFUSED, NUM_DRAFTS, NUM_DRAFT_TOKENS, NUM_ACCEPTED_TOKENS),
    *(GRAMMAR_MASKS, GRAMMAR_MASK_SECONDS),
)
_FIXED_HISTOGRAMS = (
    *(TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, TIME_PER_OUTPUT_TOKEN, E2E_LATENCY, QUEUE_TIME, PREFILL_TIME),
    *(DECODE_TIME, INFERENCE_TIME, ITERATION_TOKENS, PARAMS_N, REQUEST_NUM_PREEMPTIONS),
)
_TOKEN_HISTOGRAMS = (
    *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS, REQUEST_MAX_GENERATION_TOKENS, REQUEST_MAX_TOKENS),
    REQUEST_PREFILL_KV_COMPUTED,
)


def histograms(max_model_len: int) -> tuple[Family, ...]:
    """Returns the histograms of a model with requests of so many tokens."""
    buckets = request_tokens_buckets(max_model_len)
    return (*_FIXED_HISTOGRAMS, *(replace(family, buckets=buckets) for family in _TOKEN_HISTOGRAMS))
