"""The report on a language model as text: rows of strings, for the page too."""

from __future__ import annotations

from rich.console import Console

from perf.charts import figure, number
from perf.llm.measurement import LlmMeasurement
from perf.llm.report import LlmLevel, LlmReport
from perf.metrics import Spread
from perf.text import MISSING, Rows, print_table, say, shown_optional, shown_spread

# The columns of the table; the JSON report has all percentiles of all.
_COLUMNS = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"), ("e2e", "p50"))


def llm_rows(report: LlmReport) -> Rows:
    """A row per level, the head first."""
    opened, goodput = report.mode == "open", bool(report.settings.goodput_limits_ms)
    head = ["asked req/s", "sent req/s"] if opened else ["concurrency"]
    head += ["output tokens/s", "req/s", *(f"{metric.upper()} {name} ms" for metric, name in _COLUMNS)]
    head += ["good/s"] if goodput else []
    rows = [[*head, "completed", "failed"]]
    for level in report.levels:
        typical = level.typical
        row = [number(level.value)] + ([shown_optional(typical.achieved_rps)] if opened else [])
        row += [_shown(level, level.tokens_per_s), _shown(level, level.spread_of(lambda one: one.requests_rps))]
        row += [_latency(level, metric, name) for metric, name in _COLUMNS]
        row += [_shown(level, level.goodput)] if goodput else []
        rows.append([*row, str(typical.completed), str(typical.failed)])
    return rows


def _latency(level: LlmLevel, metric: str, name: str) -> str:
    found = level.latency(metric, name)
    latency = getattr(level.typical, metric)
    flag = "?" if latency is not None and name in latency.unsupported else ""
    return _shown(level, found) + (flag if found is not None else "")


def _shown(level: LlmLevel, found: Spread | None) -> str:
    if found is None:
        return MISSING
    return shown_spread(found) if len(level.measurements) > 1 else figure(found.median)


def llm_notes(report: LlmReport) -> list[tuple[str, str]]:
    """How the figures come about: what it is about, and a sentence."""
    found = []
    for level in report.levels:
        one = level.typical
        rate = number(one.output_tokens_per_s)
        text = f"{one.output_tokens} output tokens / {one.duration_s:.3f} s = {rate} tokens/s; {_inputs(one)}"
        found.append((level.load, text))
    if not report.settings.streamed:
        found.append(("TTFT, TPOT, ITL", f"{MISSING}: the answers were not streamed"))
    if any(one.estimated for level in report.levels for one in level.measurements):
        found.append(("ITL", "the server counts tokens only at the end: they were spread evenly over the chunks"))
    busiest = max((one for level in report.levels for one in level.measurements), key=lambda one: one.client_cores)
    cost = shown_optional(busiest.client_us_per_token)
    found.append(("client", f"{cost} us of processor a token, {busiest.client_cores:.2f} cores at the most"))
    found.append(("GPU figures", "not available"))
    return found


def _inputs(one: LlmMeasurement) -> str:
    if one.input_tokens is None or not one.completed:
        return f"input tokens {MISSING}"
    cached = "" if one.cached_tokens is None else f", {one.cached_tokens / max(1, one.input_tokens):.0%} from the cache"
    return f"{one.input_tokens / one.completed:.0f} input tokens a request{cached}"


def llm_warnings(report: LlmReport) -> list[str]:
    """The warnings of all measurements, each with its level."""
    found = []
    for level in report.levels:
        for index, one in enumerate(level.measurements):
            which = f", repeat {index + 1}" if len(level.measurements) > 1 else ""
            found += [f"{level.load}{which}: {warning}" for warning in one.warnings]
    return found


def llm_headline(report: LlmReport) -> str:
    subject = report.subject
    limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in report.settings.goodput_limits_ms.items())
    streamed = "streamed" if report.settings.streamed else "not streamed"
    return (
        f"{subject.model} over {subject.endpoint} at {subject.address}, {report.mode} loop, {streamed}, "
        f"{subject.prompts}" + (f"; goodput: {limits}" if limits else "")
    )


def print_llm_report(report: LlmReport, console: Console) -> None:
    """The whole report on `console`."""
    say(console, llm_headline(report), "bold")
    print_table(console, llm_rows(report))
    say(console, "")
    for about, note in llm_notes(report):
        say(console, f"{about}: {note}", "dim")
    for warning in llm_warnings(report):
        say(console, f"warning: {warning}", "yellow")
