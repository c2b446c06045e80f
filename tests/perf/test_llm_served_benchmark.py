"""The served benchmark: what its tables say, and that its verdict can be no."""

from __future__ import annotations

import pytest

from perf.arrivals import ClosedLoop
from perf.benchmarks.llm.served import LIMITS_MS, LOADS, STREAMS, Round, end_connection, print_goodput, print_overhead
from perf.llm.measurement import LlmMeasurement, LlmRun, LlmSettings, summarise_llm
from tests.perf.test_llm_metrics import MS, outcome


def rounds(factor: float, ttft_ms: float) -> list[Round]:
    """Three rounds, the second disturbed."""
    base = {1: 100.0, 8: 400.0, 32: 1000.0}
    return [
        Round({count: rate * factor * noise for count, rate in base.items()}, ttft_ms, 40.0) for noise in (1, 0.5, 1)
    ]


def test_the_ratio_is_of_rounds_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """A disturbance that hits all systems of a round leaves the ratio as it is."""
    assert print_overhead({"engine": rounds(1, 20), "gRPC": rounds(0.9, 27), "OpenAI": rounds(0.75, 35)})
    lines = capsys.readouterr().out.splitlines()
    assert "| engine | 100 (50-100) | 400 (200-400) | 1000 (500-1000) | 20.0 ms | 40 us a token |" in lines
    assert "| gRPC to engine (floor 0.85x) | **0.90x** | **0.90x** | **0.90x** | +7.0 ms | |" in lines


@pytest.mark.parametrize(
    ("grpc", "openai", "missed"),
    [
        ((0.84, 27), (0.75, 35), "**0.84x** MISSED"),
        ((0.9, 31), (0.75, 35), "+11.0 ms MISSED"),
        ((0.9, 27), (0.6, 35), "0.60x"),
    ],
)
def test_a_floor_that_is_missed_is_said(
    grpc: tuple[float, float], openai: tuple[float, float], missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not print_overhead({"engine": rounds(1, 20), "gRPC": rounds(*grpc), "OpenAI": rounds(*openai)})
    assert missed in capsys.readouterr().out


def goodput(good: int) -> list[list[LlmMeasurement]]:
    """One round of each load: so many good answers within a second, and one that is too slow."""
    outcomes = [outcome((100, 1), (140, 1))] * good + [outcome((600, 1), (640, 1))]
    one = summarise_llm(
        LlmRun(tuple(outcomes), 0, 1000 * MS, 0.01), ClosedLoop(1), LlmSettings(goodput_limits_ms=LIMITS_MS)
    )
    return [[one] for _ in LOADS]


def test_goodput_wants_ours_to_be_the_best_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_goodput({"modelkiln": goodput(6), "vLLM CPU": goodput(4)}, 1)
    printed = capsys.readouterr().out
    assert printed.count("1.50x") == len(LOADS) == len(STREAMS) + 1 and "**6.00 (6.00-6.00)**" in printed
    assert print_goodput({"modelkiln": goodput(6), "vLLM CPU": goodput(0)}, 1)
    assert "all to none" in capsys.readouterr().out
    worse = goodput(6)
    worse[2] = goodput(3)[2]
    assert not print_goodput({"modelkiln": worse, "vLLM CPU": goodput(4)}, 1)
    assert "0.75x MISSED" in capsys.readouterr().out


def test_goodput_is_compared_with_each_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """One better server is enough for a no, wherever it stands in the table."""
    better, worse = goodput(8), goodput(4)
    assert not print_goodput({"modelkiln": goodput(6), "vLLM CPU": worse, "llama.cpp": better}, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "| to vLLM CPU | " + " | ".join(["1.50x"] * len(LOADS)) + " |",
        "| to llama.cpp | " + " | ".join(["0.75x MISSED"] * len(LOADS)) + " |",
    ]
    assert not print_goodput({"modelkiln": goodput(6), "llama.cpp": better, "vLLM CPU": worse}, 1)
    assert print_goodput({"modelkiln": goodput(8), "llama.cpp": better, "vLLM CPU": worse}, 1)


def test_the_last_request_of_a_connection_says_so_and_nothing_else() -> None:
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n\r\n"
    assert end_connection(request) == (
        b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nHost: x\r\nContent-Length: 2\r\n\r\n\r\n"
    )
