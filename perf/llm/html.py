"""The report on a language model as one HTML page: no network, no scripts, charts inline."""

from __future__ import annotations

from markupsafe import Markup

from perf.charts import Series, level_axis, line_chart, linear_axis, value_axis
from perf.html import distribution_figure, line_legend, load_title, page_template
from perf.llm.report import LlmReport
from perf.llm.text import llm_notes, llm_rows, llm_warnings

_SHOWN = ("ttft", "tpot", "itl", "e2e")
_PERCENTILES = ("p50", "p90", "p99")
_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2e": "End to end",
}


def render_llm_html(report: LlmReport) -> str:
    """The whole page."""
    return page_template("llm.html.j2").render(
        report=report,
        figures=_figures(report),
        level_table=llm_rows(report),
        note_list=llm_notes(report),
        warning_list=llm_warnings(report),
        best=max(report.levels, key=lambda level: level.tokens_per_s.median),
    )


def _figures(report: LlmReport) -> list[dict[str, object]]:
    """Title, legend, note and SVG of every chart that the report has figures for."""
    figures = [_token_figure(report), _request_figure(report)]
    for metric in _SHOWN:
        if any(level.latency(metric, "p50") for level in report.levels):
            figures += [_load_figure(report, metric), _metric_distribution(report, metric)]
    return figures


def _token_figure(report: LlmReport) -> dict[str, object]:
    series = Series("output tokens", tuple((level.value, level.tokens_per_s.median) for level in report.levels), 0)
    return _lines(report, "Output tokens against load", "tokens per second", [series], "As the server counts them.")


def _request_figure(report: LlmReport) -> dict[str, object]:
    series = [Series("completed", tuple((level.value, level.typical.requests_rps) for level in report.levels), 0)]
    if report.settings.goodput_limits_ms:
        good = tuple((level.value, level.goodput.median if level.goodput else 0.0) for level in report.levels)
        series.append(Series("goodput", good, 1))
    if report.mode == "open":
        series.append(Series("asked for", tuple((level.value, level.value) for level in report.levels), 2))
    return _lines(report, "Requests against load", "requests per second", series, "Failures are no good requests.")


def _lines(report: LlmReport, title: str, axis_title: str, series: list[Series], note: str) -> dict[str, object]:
    svg = line_chart(
        title,
        level_axis(load_title(report.mode), [level.value for level in report.levels]),
        linear_axis(axis_title, max(y for one in series for _, y in one.points)),
        series,
    )
    return {"title": title, "note": note, "legend": line_legend(series), "svg": Markup(svg)}


def _load_figure(report: LlmReport, metric: str) -> dict[str, object]:
    series = []
    for style, name in enumerate(_PERCENTILES):
        spreads = [(level.value, level.latency(metric, name)) for level in report.levels]
        points = tuple((value, one.median) for value, one in spreads if one is not None)
        series.append(Series(name, points, style))
    title = f"{_NAMES[metric]} against load"
    svg = line_chart(
        title,
        level_axis(load_title(report.mode), [level.value for level in report.levels]),
        value_axis(f"{metric.upper()}, ms", [y for one in series for _, y in one.points]),
        series,
    )
    note = "Nearest-rank percentiles of " + ("tokens" if metric == "itl" else "requests that succeeded")
    counted = ", counted from when each was due." if report.mode == "open" and metric in ("ttft", "e2e") else "."
    return {"title": title, "note": note + counted, "legend": line_legend(series), "svg": Markup(svg)}


def _metric_distribution(report: LlmReport, metric: str) -> dict[str, object]:
    found = [(level.load, getattr(level.typical, metric)) for level in report.levels]
    levels = [(load, latency.cdf) for load, latency in found if latency is not None]
    of = "Of the tokens after each first chunk." if metric == "itl" else "Of the requests that succeeded."
    return distribution_figure(f"Distribution of {metric.upper()}", f"{metric.upper()}, ms", of, levels)
