"""The report as text: rows of strings, for the page too, and the tables made of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from perf.charts import figure, number
from perf.comparison import Comparison
from perf.metrics import Spread
from perf.report import Level, Report
from perf.server_stats import PHASES, PYTHON, ModelActivity

Rows = list[list[str]]
MISSING = "n/a"


def level_rows(report: Report) -> Rows:
    """A row per level, the head first."""
    repeated = report.settings.repeats > 1
    head = ["concurrency" if report.mode == "closed" else "asked req/s"]
    head += ["sent req/s"] if report.mode == "open" else []
    head += ["req/s", "infer/s"] if report.subject.batch_size > 1 else ["req/s"]
    head += [f"{name} ms" for name in report.percentile_names] + ["mean ms"]
    head += ["good/s"] if report.settings.goodput_limits_ms else []
    head += ["samples", "failed", "stable"]
    rows = [head]
    for level in report.levels:
        typical = level.typical
        row = [number(level.value)]
        row += [shown_optional(typical.achieved_rps)] if report.mode == "open" else []
        row += [shown_spread(level.throughput) if repeated else figure(typical.throughput_rps)]
        row += [figure(typical.inferences_rps)] if report.subject.batch_size > 1 else []
        for name in report.percentile_names:
            row.append(_percentile(level, name, repeated))
        row.append(shown_optional(typical.latency.mean if typical.latency else None))
        row += [shown_optional(typical.goodput_rps)] if report.settings.goodput_limits_ms else []
        row += [str(typical.latency.samples if typical.latency else 0), str(typical.failed)]
        row.append({True: "yes", False: "NO", None: MISSING}[typical.stable])
        rows.append(row)
    return rows


def server_rows(report: Report) -> Rows:
    """A row per level and model, the head first; the head alone when the server gave no statistics."""
    rows = [["load", "model", "executions", "mean batch", "batches (size x times)"]]
    rows[0] += [f"{phase.removeprefix('compute_')} ms" for phase in PHASES]
    for level in report.levels:
        for model in level.typical.server:
            rows.append([number(level.value), *_model_cells(model)])
    return rows


def _model_cells(model: ModelActivity) -> list[str]:
    histogram = " ".join(f"{size}x{count}" for size, count in model.batches.items()) or MISSING
    name = f"{model.model}:{model.version}" + (" (ensemble)" if model.is_ensemble else "")
    cells = [name, str(model.executions), shown_optional(model.mean_batch), histogram]
    return cells + [figure(model.phase_us[phase] / 1e3) if phase in model.phase_us else MISSING for phase in PHASES]


def notes(report: Report) -> list[tuple[str, str]]:
    """How the figures come about: what it is about, and a sentence."""
    found = []
    for level in report.levels:
        one = level.typical
        rate = number(one.throughput_rps)
        found.append((level.load, f"{one.completed} completed / {one.duration_s:.3f} s = {rate} requests/s"))
    if any(model.is_ensemble for level in report.levels for model in level.typical.server):
        found.append(
            (
                "ensemble",
                "server times are sums over the steps, not wall time; latency is the client's wall time",
            )
        )
    if report.subject.platform == PYTHON:
        found += [
            (level.load, text) for level in report.levels if (text := _inner_batches(level, report.subject.model))
        ]
    if any(one.stable is None for level in report.levels for one in level.measurements):
        found.append(("stability", "not judged, as that takes three windows"))
    found.append(("GPU figures", "not available"))
    return found


def _inner_batches(level: Level, measured: str) -> str:
    """What became of a Python model's batches in the models that it calls; empty where no other model worked."""
    means = {m.model: m.mean_batch for m in level.typical.server if m.mean_batch is not None}
    outer = means.pop(measured, None)
    if outer is None or not means:
        return ""
    inner = ", ".join(f"{model} of {mean:.1f}" for model, mean in means.items())
    return (
        f"{measured} was executed in batches of {outer:.1f} on average, and meanwhile {inner}: where it calls them, "
        "smaller ones are batches that it takes apart; one call for all requests of an execute keeps them whole"
    )


def warnings(report: Report) -> list[str]:
    """The warnings of all measurements, each with its level."""
    found = []
    for level in report.levels:
        for index, one in enumerate(level.measurements):
            which = f", repeat {index + 1}" if len(level.measurements) > 1 else ""
            found += [f"{level.load}{which}: {warning}" for warning in one.warnings]
    return found


def headline(report: Report) -> str:
    subject = report.subject
    version = f" version {subject.version}" if subject.version else ""
    limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in report.settings.goodput_limits_ms.items())
    return (
        f"{subject.model}{version} over {subject.protocol} at {subject.address}, {report.mode} loop, "
        f"batch size {subject.batch_size}, {subject.workload}" + (f", goodput: {limits}" if limits else "")
    )


def print_report(report: Report, console: Console) -> None:
    """The whole report on `console`."""
    say(console, headline(report), "bold")
    print_table(console, level_rows(report))
    server = server_rows(report)
    if len(server) > 1:
        say(console, "\nServer, mean per request", "bold")
        print_table(console, server)
    say(console, "")
    for about, note in notes(report):
        say(console, f"{about}: {note}", "dim")
    for warning in warnings(report):
        say(console, f"warning: {warning}", "yellow")


def print_table(console: Console, rows: Rows) -> None:
    """Columns of plain text, the head in bold on a terminal. No width folds a figure."""
    head, *lines = plain_table(rows)
    say(console, head, "bold")
    for line in lines:
        say(console, line)


def plain_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the columns aligned: numbers to the right, words to the left."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if _is_text(rows, index) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_text(rows: Sequence[Sequence[str]], column: int) -> bool:
    return any(row[column][:1].isalpha() and row[column] != MISSING for row in rows[1:])


def say(console: Console, text: str, style: str | None = None) -> None:
    console.print(Text(text, style=style or ""), soft_wrap=True)


def _percentile(level: Level, name: str, repeated: bool) -> str:
    spread = level.latency(name)
    if spread is None:
        return MISSING
    latency = level.typical.latency
    flag = "?" if latency is not None and name in latency.unsupported else ""
    return (shown_spread(spread) if repeated else figure(spread.median)) + flag


def shown_spread(spread: Spread) -> str:
    return f"{figure(spread.median)} [{figure(spread.low)}, {figure(spread.high)}]"


def shown_optional(value: float | None) -> str:
    return MISSING if value is None else figure(value)


def comparison_rows(comparison: Comparison) -> Rows:
    """A row per level and figure, the head first."""
    rows = [["load", "figure", "old", "new", "new / old", "verdict"]]
    verdicts = {True: "intervals overlap", False: "intervals apart", None: "one sample each"}
    for change in comparison.changes:
        rows.append(
            [
                change.load,
                change.figure,
                shown_spread(change.old) if change.overlap is not None else figure(change.old.median),
                shown_spread(change.new) if change.overlap is not None else figure(change.new.median),
                MISSING if change.ratio is None else f"{change.ratio:.2f}x",
                verdicts[change.overlap],
            ]
        )
    return rows
