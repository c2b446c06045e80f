"""Charts as SVG text: scales, ticks, lines, bars. Pure; colours are CSS classes, which the page defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 46
_CHARACTER = 6.6  # width of a digit at the font size of the tick labels
_ROW = 30  # height of one bar with its gap

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line: points in ascending x. `style` picks colour, dash and marker."""

    name: str
    points: tuple[Point, ...]
    style: int


@dataclass(frozen=True)
class Axis:
    """One axis: its title with the unit, where its ticks stand, and how values become positions.

    Attributes:
        title: what it shows, with the unit.
        ticks: values that get a label.
        low: the value at the start of the axis.
        high: the value at its end.
        log: equal ratios take equal lengths.
        suffix: behind every label, as "%".
    """

    title: str
    ticks: tuple[float, ...]
    low: float
    high: float
    log: bool = False
    suffix: str = ""

    def position(self, value: float) -> float:
        """Where `value` lies between the two ends: 0 to 1."""
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: parts side by side, in the order of the legend."""

    label: str
    parts: tuple[float, ...]


def linear_axis(title: str, highest: float, suffix: str = "") -> Axis:
    """From zero to a round number at or above `highest`."""
    ticks = round_ticks(highest)
    return Axis(title, ticks, 0.0, ticks[-1], suffix=suffix)


def value_axis(title: str, values: Sequence[float]) -> Axis:
    """For latencies: linear from zero, or logarithmic when they span more than a factor of 30."""
    lowest, highest = min(values), max(values)
    if lowest <= 0 or highest / lowest <= 30:
        return linear_axis(title, highest)
    ticks = log_ticks(lowest, highest)
    return Axis(f"{title}, logarithmic", ticks, ticks[0], ticks[-1], log=True)


def level_axis(title: str, levels: Sequence[float]) -> Axis:
    """For levels of load: a tick at every one that was measured; logarithmic when they span a factor of 8."""
    low, high = min(levels), max(levels)
    log = low > 0 and high / low >= 8
    margin = 0.06
    if low == high:
        return Axis(title, (low,), low, high)
    if log:
        ratio = (high / low) ** margin
        return Axis(
            f"{title}, logarithmic" if len(levels) > 1 else title,
            tuple(levels),
            low / ratio,
            high * ratio,
            log,
        )
    width = (high - low) * margin
    return Axis(title, tuple(levels), low - width, high + width)


def round_ticks(highest: float, wanted: int = 5) -> tuple[float, ...]:
    """Ticks from 0 to at or above `highest`, in steps of 1, 2 or 5 times a power of ten."""
    if not highest > 0:
        return (0.0, 1.0)
    rough = highest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    count = math.ceil(highest / step - 1e-9)
    return tuple(index * step for index in range(count + 1))


def log_ticks(lowest: float, highest: float) -> tuple[float, ...]:
    """Ticks that enclose both values: 1, 2 and 5 times powers of ten; see `_spaced` for which get a label."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max(tick for tick in every if tick <= lowest * (1 + 1e-9))
    above = min(tick for tick in every if tick >= highest * (1 - 1e-9))
    return tuple(tick for tick in every if below <= tick <= above)


def figure(value: float) -> str:
    """A figure for a column: three significant digits or all before the point, thousands separated."""
    rounded = abs(float(f"{value:.3g}"))
    decimals = 0 if rounded == 0 else max(0, 2 - math.floor(math.log10(rounded)))
    return f"{value:,.{decimals}f}"


def number(value: float) -> str:
    """As `figure`, without trailing zeros: for a figure that stands alone."""
    text = figure(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def line_chart(title: str, x_axis: Axis, y_axis: Axis, series: Sequence[Series], markers: bool = True) -> str:
    """An SVG of lines. Every marker says its value when pointed at."""
    width, height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(point: Point) -> Point:
        return _LEFT + x_axis.position(point[0]) * width, _TOP + (1 - y_axis.position(point[1])) * height

    parts = [
        _open_svg(title, HEIGHT),
        *_horizontal_grid(y_axis, width, height),
        *_x_labels(x_axis, width, height),
    ]
    for one in series:
        placed = [place(point) for point in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="line s{one.style}" points="{path}"/>')
        if markers:
            parts += [
                _marker(one, at, f"{one.name}: {number(value[1])}{y_axis.suffix} at {number(value[0])}")
                for at, value in zip(placed, one.points, strict=True)
            ]
    parts += _axis_titles(x_axis.title, y_axis.title, HEIGHT)
    return "".join(parts) + "</svg>"


def bar_chart(title: str, x_title: str, part_names: Sequence[str], bars: Sequence[Bar]) -> str:
    """An SVG of stacked horizontal bars, one row each, the sum behind it."""
    left = min(190.0, 14 + max(len(bar.label) for bar in bars) * _CHARACTER)
    height = _ROW * len(bars)
    full = height + _TOP + _BOTTOM
    totals = [sum(bar.parts) for bar in bars]
    axis = linear_axis(x_title, max(totals))
    sum_width = max(len(number(total)) for total in totals) * _CHARACTER + 10
    width = WIDTH - left - _RIGHT - sum_width
    parts = [_open_svg(title, full)]
    for tick in _spaced(axis, width):
        x = left + axis.position(tick) * width
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}"/>')
        at = f'x="{x:.1f}" y="{_TOP + height + 16}"'
        parts.append(f'<text class="tick" text-anchor="middle" {at}>{number(tick)}</text>')
    most = round((left - 14) / _CHARACTER)
    for row, bar in enumerate(bars):
        y = _TOP + row * _ROW + 5
        label = bar.label if len(bar.label) <= most else bar.label[: most - 1] + "…"
        parts.append(
            f'<text class="tick" text-anchor="end" x="{left - 8:.1f}" y="{y + 14}">{escape(label)}'
            f"<title>{escape(bar.label)}</title></text>"
        )
        x = left
        for style, (name, value) in enumerate(zip(part_names, bar.parts, strict=True)):
            length = axis.position(value) * width
            parts.append(
                f'<rect class="area s{style}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_ROW - 10}">'
                f"<title>{escape(bar.label)}, {escape(name)}: {number(value)}</title></rect>"
            )
            x += length
        parts.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + 14}">{number(totals[row])}</text>')
    middle = left + width / 2
    parts.append(f'<text class="label" text-anchor="middle" x="{middle:.1f}" y="{full - 8}">{escape(x_title)}</text>')
    return "".join(parts) + "</svg>"


def legend_sample(style: int, kind: str) -> str:
    """A small SVG that looks as the series does. `kind`: "line", "marked" (with a marker), "area"."""
    start = '<svg viewBox="0 0 26 12" aria-hidden="true" xmlns="http://www.w3.org/2000/svg">'
    if kind == "area":
        return f'{start}<rect class="area s{style}" x="4" y="0" width="18" height="12"/></svg>'
    line = f'<polyline class="line s{style}" points="1,6 25,6"/>'
    marker = _marker(Series("", (), style), (13, 6), "") if kind == "marked" else ""
    return f"{start}{line}{marker}</svg>"


def _open_svg(title: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _horizontal_grid(axis: Axis, width: float, height: float) -> list[str]:
    parts = []
    for tick in axis.ticks:
        y = _TOP + (1 - axis.position(tick)) * height
        kind = "axis" if tick == axis.low else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{number(tick)}{axis.suffix}"
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{y + 4:.1f}">{label}</text>')
    return parts


def _x_labels(axis: Axis, width: float, height: float) -> list[str]:
    bottom = _TOP + height
    parts = []
    shown = _spaced(axis, width)
    for tick in axis.ticks:
        x = _LEFT + axis.position(tick) * width
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        if tick in shown:
            parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 17}">{number(tick)}</text>')
    return parts


def _spaced(axis: Axis, width: float) -> list[float]:
    """The ticks whose labels do not touch; the last one stays, and crowds out those before it."""
    shown: list[float] = []
    free_until = float("inf")
    for tick in reversed(axis.ticks):
        half = len(number(tick)) * _CHARACTER / 2
        x = axis.position(tick) * width
        if x + half + _CHARACTER <= free_until:
            shown.append(tick)
            free_until = x - half
    return shown[::-1]


def _axis_titles(x_title: str, y_title: str, height: float) -> list[str]:
    x = _LEFT + (WIDTH - _LEFT - _RIGHT) / 2
    y = _TOP + (height - _TOP - _BOTTOM) / 2
    return [
        f'<text class="label" text-anchor="middle" x="{x:.1f}" y="{height - 8}">{escape(x_title)}</text>',
        f'<text class="label" text-anchor="middle" transform="translate(13 {y:.1f}) rotate(-90)">'
        f"{escape(y_title)}</text>",
    ]


def _marker(series: Series, at: Point, text: str) -> str:
    """A shape for each style, so that the lines are told apart without their colours, too."""
    x, y = at
    title = f"<title>{escape(text)}</title>" if text else ""
    shape = series.style % 4
    if shape == 0:
        return f'<circle class="mark s{series.style}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>'
    corners = {
        1: ((-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)),
        2: ((0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
        3: ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="mark s{series.style}" points="{points}">{title}</polygon>'
