"""The report as CSV, with perf_analyzer's column names and units (microseconds) where it has the column."""

from __future__ import annotations

import csv
import io

from perf.report import Level, Report
from perf.server_stats import PHASES, ModelActivity

_SERVER_COLUMNS = ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output")


def render_csv(report: Report) -> str:
    """A line per level. An empty cell means: not available."""
    load = "Concurrency" if report.mode == "closed" else "Request Rate"
    head = [load, "Inferences/Second", *_SERVER_COLUMNS, "Avg latency"]
    head += [f"{name} latency" for name in report.percentile_names]
    head += ["Mode", "Requests/Second", "Achieved Request Rate", "Goodput", "Completed", "Failed"]
    head += ["Window Seconds", "Samples", "Stable"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for level in report.levels:
        writer.writerow(_row(report, level))
    return text.getvalue()


def _row(report: Report, level: Level) -> list[str]:
    one = level.typical
    server = _measured_model(report, level)
    row = [f"{level.value:g}", f"{one.inferences_rps:.3f}"]
    row += [f"{server.phase_us[phase]:.0f}" if server and phase in server.phase_us else "" for phase in PHASES]
    row.append(f"{one.latency.mean * 1e3:.0f}" if one.latency else "")
    row += [f"{one.latency.percentiles[name] * 1e3:.0f}" if one.latency else "" for name in report.percentile_names]
    row += [report.mode, f"{one.throughput_rps:.3f}", _optional(one.achieved_rps), _optional(one.goodput_rps)]
    row += [str(one.completed), str(one.failed), f"{one.duration_s:.6f}"]
    row += [
        str(one.latency.samples if one.latency else 0),
        "" if one.stable is None else str(one.stable).lower(),
    ]
    return row


def _measured_model(report: Report, level: Level) -> ModelActivity | None:
    """The model that was asked for: an ensemble's steps are not in perf_analyzer's columns either."""
    found = [model for model in level.typical.server if model.model == report.subject.model]
    return found[0] if found else None


def _optional(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3f}"
