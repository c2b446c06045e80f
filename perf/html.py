"""The report as one HTML page: no network, no scripts, charts inline. The layout is in the template."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from perf.charts import (
    Bar,
    Point,
    Series,
    bar_chart,
    legend_sample,
    level_axis,
    line_chart,
    linear_axis,
    number,
    value_axis,
)
from perf.report import Level, Report
from perf.server_stats import PHASES
from perf.text import level_rows, notes, server_rows, warnings

_TEMPLATES = Path(__file__).parent / "templates"
STYLES = 8  # colours of the page
PHASE_NAMES = ("queue", "compute input", "compute infer", "compute output")


def render_html(report: Report) -> str:
    """The whole page."""
    return page_template("report.html.j2").render(
        report=report,
        figures=_figures(report),
        level_table=level_rows(report),
        server_table=server_rows(report),
        note_list=notes(report),
        warning_list=warnings(report),
        best=max(report.levels, key=lambda level: level.typical.throughput_rps),
    )


def page_template(name: str) -> Template:
    """The template of a page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = number
    return environment.get_template(name)


def _figures(report: Report) -> list[dict[str, object]]:
    """Title, legend, note and SVG of every chart that the report has figures for."""
    measured = [level for level in report.levels if level.typical.latency is not None]
    figures = []
    if measured:
        figures.append(_latency_figure(report, measured))
    figures.append(_throughput_figure(report))
    if measured:
        figures.append(_distribution_figure(report, measured))
    bars = _server_bars(report)
    if bars:
        figures.append(
            {
                "title": "Where the server spends its time",
                "note": "Mean per request. Each request of a batch is charged the whole batch's time; "
                "an ensemble's steps add up even where they run at the same time.",
                "legend": [(name, Markup(legend_sample(style, "area"))) for style, name in enumerate(PHASE_NAMES)],
                "svg": Markup(bar_chart("Server time", "milliseconds per request", PHASE_NAMES, bars)),
            }
        )
    return figures


def load_title(mode: str) -> str:
    """The title of the axis of levels."""
    return "concurrency (requests in flight)" if mode == "closed" else "requests per second asked for"


def _latency_figure(report: Report, levels: list[Level]) -> dict[str, object]:
    names = report.percentile_names
    series = []
    for style, name in enumerate(names):
        spreads = [(level.value, level.latency(name)) for level in levels]
        points = tuple((value, one.median) for value, one in spreads if one is not None)
        series.append(Series(name, points, style % STYLES))
    values = [y for one in series for _, y in one.points] or [1.0]
    title = "Latency against load"
    svg = line_chart(
        title,
        level_axis(load_title(report.mode), [level.value for level in levels]),
        value_axis("latency, ms", values),
        series,
    )
    return {
        "title": title,
        "note": "Nearest-rank percentiles of all requests that succeeded"
        + (", counted from when each was due." if report.mode == "open" else "."),
        "legend": line_legend(series),
        "svg": Markup(svg),
    }


def _throughput_figure(report: Report) -> dict[str, object]:
    rates = [Series("completed", tuple((level.value, level.throughput.median) for level in report.levels), 0)]
    if report.settings.goodput_limits_ms:
        good = tuple((level.value, level.typical.goodput_rps or 0.0) for level in report.levels)
        rates.append(Series("goodput", good, 1))
    if report.mode == "open":
        asked = tuple((level.value, level.value) for level in report.levels)
        rates.append(Series("asked for", asked, 2))
    title = "Throughput against load"
    highest = max(y for one in rates for _, y in one.points)
    svg = line_chart(
        title,
        level_axis(load_title(report.mode), [level.value for level in report.levels]),
        linear_axis("requests per second", highest),
        rates,
    )
    return {
        "title": title,
        "note": "Requests completed within the window, divided by its length.",
        "legend": line_legend(rates),
        "svg": Markup(svg),
    }


def _distribution_figure(report: Report, levels: list[Level]) -> dict[str, object]:
    found = [(level.load, level.typical.latency.cdf) for level in levels if level.typical.latency is not None]
    return distribution_figure("Distribution of latency", "latency, ms", "Of the requests that succeeded.", found)


def distribution_figure(
    title: str, axis_title: str, note: str, levels: list[tuple[str, tuple[Point, ...]]]
) -> dict[str, object]:
    """A figure of cumulative shares, one line for each level; of many levels some are left out.

    Args:
        levels: the load in words, and (ms, share at most that slow).
    """
    shown = levels
    if len(levels) > STYLES:  # evenly chosen, the first and the last among them
        shown = [levels[round(index * (len(levels) - 1) / (STYLES - 1))] for index in range(STYLES)]
    series = [
        Series(load, tuple((ms, share * 100) for ms, share in cdf), style) for style, (load, cdf) in enumerate(shown)
    ]
    svg = line_chart(
        title,
        value_axis(axis_title, [ms for one in series for ms, _ in one.points]),
        linear_axis("at most that slow", 100, "%"),
        series,
        markers=False,
    )
    left_out = f" {len(levels) - len(shown)} levels are left out." if len(shown) < len(levels) else ""
    return {
        "title": title,
        "note": f"{note} The further left and the steeper, the better.{left_out}",
        "legend": line_legend(series, "line"),
        "svg": Markup(svg),
    }


def line_legend(series: list[Series], kind: str = "marked") -> list[tuple[str, Markup]]:
    """Names and samples of lines."""
    return [(one.name, Markup(legend_sample(one.style, kind))) for one in series]


def _server_bars(report: Report) -> list[Bar]:
    return [
        Bar(
            f"{number(level.value)} · {model.model}",
            tuple(model.phase_us.get(phase, 0.0) / 1e3 for phase in PHASES),
        )
        for level in report.levels
        for model in level.typical.server
        if model.phase_us
    ]
