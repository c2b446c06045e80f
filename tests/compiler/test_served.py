"""The choice under an SLO, from figures; tests/e2e/test_slo.py measures them on a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.candidate_report import table
from compiler.candidates import Candidate
from compiler.errors import ModelRefused, SpecError
from compiler.goals import SloSpec, read_slo
from compiler.optimise import Choice
from compiler.served import Served, choose_served
from compiler.spec import Tolerance
from compiler.verify import ParityReport
from compiler.yaml_reader import node_from_plain

SLO = SloSpec(percentile=99, limit_ms=10, concurrency=8)
PARITY = ParityReport((), Tolerance(None, 0, 0))
GOOD = Served(3.0, 9.0, 500.0, 495.0, 3000, 0, True)


@pytest.fixture
def candidate(tmp_path: Path):
    def make(name: str, served: Served | None, latency_ms: float = 1.0, refused: str = "") -> Candidate:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_bytes(b"x" * 2_500_000)
        choice = Choice(name, "fp32")
        return Candidate(
            choice, tmp_path / name, (), {}, PARITY, refused, "model", latency_ms=latency_ms, served=served
        )

    return make


def test_goodput_decides_among_those_that_meet_the_slo_and_not_a_single_calls_latency(candidate):
    quick_alone = candidate("a", replace(GOOD, goodput_rps=400.0), latency_ms=1.0)
    best = candidate("b", GOOD, latency_ms=2.0)
    too_slow = candidate("c", replace(GOOD, percentile_ms=10.1, goodput_rps=900.0))
    failing = candidate("d", replace(GOOD, failed=1, goodput_rps=900.0))
    unserved = candidate("e", None, refused="not served: no backend")
    everything = [quick_alone, best, too_slow, failing, unserved]
    assert choose_served(everything, SLO, list) is best
    rows = [line.split() for line in table(everything, best, SLO)]
    assert rows == [
        ["candidate", "ms", "cosine", "p50", "ms", "p99", "ms", "good/s", "all/s", "MB"],
        ["b", "fp32", "2.00", "1.000000", "3.00", "9.00", "495.0", "500.0", "2.5", "shipped"],
        ["c", "fp32", "1.00", "1.000000", "3.00", "10.10", "900.0", "500.0", "2.5", "misses", "the", "SLO"],
        ["d", "fp32", "1.00", "1.000000", "3.00", "9.00", "900.0", "500.0", "2.5", "1", "requests", "failed"],
        ["a", "fp32", "1.00", "1.000000", "3.00", "9.00", "400.0", "500.0", "2.5"],
        [
            "e",
            "fp32",
            "1.00",
            "1.000000",
            "-",
            "-",
            "-",
            "-",
            "2.5",
            *["not", "served:", "no", "backend"],
        ],
    ]


def test_a_limit_is_met_at_exactly_its_value(candidate):
    exact = candidate("a", replace(GOOD, percentile_ms=10.0))
    assert choose_served([exact], SLO, list) is exact


def test_where_none_meets_it_the_refusal_has_the_table(candidate):
    slow = candidate("a", replace(GOOD, percentile_ms=11.0))
    with pytest.raises(ModelRefused) as error:
        choose_served([slow], SLO, lambda: ["the", "table"])
    assert error.value.message == "no candidate meets p99=10ms at concurrency 8:\n  the\n  table"


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({"p99": "10ms", "concurrency": 8}, SLO),
        ({"p50": "2s"}, SloSpec(50, 2000, 1)),
        ({"p99.9": "0.5ms"}, SloSpec(99.9, 0.5, 1)),
    ],
)
def test_what_is_read(slo, expected):
    assert read_slo(node_from_plain(slo, "s.yaml")) == expected


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({"concurrency": 8}, "slo has no percentile; allowed: one percentile and its limit, as in p99: 10ms"),
        ({"p99": "10ms", "p50": "1ms"}, "slo has p99, p50; allowed: one percentile"),
        ({"p0": "10ms"}, "slo has p0; allowed: one percentile"),
        ({"p100": "10ms"}, "slo has p100; allowed: one percentile"),
        ({"latency": "10ms"}, "slo has latency; allowed: one percentile"),
        ({"p99": 10}, "slo.p99 is 10; allowed: a time such as 10ms, 0.5ms or 2s"),
        ({"p99": "0ms"}, "slo.p99 is '0ms'; allowed: a time"),
        ({"p99": "10ms", "concurrency": 0}, "slo.concurrency is 0; allowed: 1 to 1024"),
    ],
)
def test_a_wrong_slo_is_told_with_its_line(slo, message):
    with pytest.raises(SpecError) as error:
        read_slo(node_from_plain(slo, "s.yaml"))
    assert error.value.message.startswith(f"s.yaml:1: {message}")
