"""What a person is told of candidates: lines while they are built, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiler.candidates import Candidate
from compiler.goals import SloSpec
from compiler.targets.registry import SOURCE_FILE, target_named


def candidate_lines(candidate: Candidate, named: bool) -> list[str]:
    """Returns what is told of one candidate while others are still being built."""
    lines = [str(candidate.choice)] if named else []
    for report in candidate.passes:
        lines += [report.line(), *(f"  note: {note}" for note in report.notes)]
    lines += candidate.facts.get("notes", ())
    if candidate.parity is not None and candidate.judged_on == SOURCE_FILE:
        file = target_named(candidate.choice.target).model_file
        lines.append(
            f"{file} itself was NOT run: this machine cannot. Parity is judged on {SOURCE_FILE}, "
            "from which it was built, with ONNX Runtime on the CPU"
        )
    if candidate.parity is not None:
        cases = len({c.case for c in candidate.parity.comparisons})
        figures = f"max abs {candidate.parity.max_abs:.2e}, worst cosine {candidate.parity.worst_cosine:.7f}"
        lines.append(f"{cases} cases: {figures}")
    if candidate.metric is not None:
        lines.append(f"metric: {candidate.metric:g}")
    if candidate.refused and named:
        lines.append(f"refused: {candidate.refused.splitlines()[0]}")
    return lines


def table(candidates: Sequence[Candidate], chosen: Candidate | None, slo: SloSpec | None = None) -> list[str]:
    """Returns the comparison of all candidates as lines of text; columns that no candidate fills are left out."""
    columns: list[tuple[str, Callable[[Candidate], str]]] = [
        ("ms", lambda c: _number(c.latency_ms, 2)),
        ("cosine", lambda c: _number(c.parity.worst_cosine if c.parity else None, 6)),
        ("metric", lambda c: _number(c.metric, 4)),
    ]
    if slo:
        columns += [
            ("p50 ms", lambda c: _number(c.served.p50_ms if c.served else None, 2)),
            (f"p{slo.percentile:g} ms", lambda c: _number(c.served.percentile_ms if c.served else None, 2)),
            ("good/s", lambda c: _number(c.served.goodput_rps if c.served else None, 1)),
            ("all/s", lambda c: _number(c.served.throughput_rps if c.served else None, 1)),
        ]
    columns.append(("MB", lambda c: f"{c.num_bytes / 1e6:.1f}"))
    shown = [(name, show) for name, show in columns if any(show(c) != "-" for c in candidates)]
    lines = [f"{'candidate':<24}" + "".join(f"{name:>10}" for name, _ in shown)]
    for c in sorted(candidates, key=lambda c: _rank(c, chosen)):
        mark = "shipped" if c is chosen else c.refused.split("\n")[0][:90] or _served_note(c, slo)
        lines.append(f"{c.choice!s:<24}" + "".join(f"{show(c):>10}" for _, show in shown) + f"  {mark}".rstrip())
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rank(candidate: Candidate, chosen: Candidate | None) -> tuple[bool, bool, float, float]:
    goodput = candidate.served.goodput_rps if candidate.served else 0.0
    return candidate is not chosen, bool(candidate.refused), -goodput, candidate.latency_ms or 0.0


def _served_note(candidate: Candidate, slo: SloSpec | None) -> str:
    if slo is None or candidate.served is None:
        return ""
    if candidate.served.failed:
        return f"{candidate.served.failed} requests failed"
    return "" if candidate.served.meets(slo) else "misses the SLO"
