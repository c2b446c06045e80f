"""The report in all its forms, and two of them compared."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from perf.arrivals import ClosedLoop, OpenLoop
from perf.charts import figure, linear_axis, log_ticks, number, round_ticks
from perf.comparison import compare
from perf.csv import render_csv
from perf.errors import UsageError
from perf.html import render_html
from perf.json_form import to_json
from perf.measurement import Settings
from perf.report import Report, from_json
from perf.text import plain_table, print_report
from tests.perf.builders import report_of

CLOSED = [ClosedLoop(1), ClosedLoop(4)]
OPEN = [OpenLoop(100, "poisson"), OpenLoop(200, "poisson")]
GOODPUT = Settings(goodput_limits_ms={"request_latency": 10}, percentile=99.9)


def text_of(report: Report) -> str:
    console = Console(file=io.StringIO(), force_terminal=False)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    "report",
    [
        report_of(CLOSED, [[1.0] * 100]),
        report_of(OPEN, [[1.0] * 10], GOODPUT, failed=(3,)),
        report_of(CLOSED, [[1.0] * 5], failed=range(5)),
    ],
)
def test_json_round_trip_is_exact(report: Report) -> None:
    assert from_json(to_json(report), "here") == report


@pytest.mark.parametrize("change", [{"schema": "other/9"}, {"levels": []}, {"levels": [{}]}, {"mode": 5}])
def test_what_is_no_report_is_refused_by_name(change: dict[str, object]) -> None:
    document = json.loads(to_json(report_of(CLOSED, [[1.0]]))) | change
    with pytest.raises(UsageError, match=re.escape("some/file.json")):
        from_json(json.dumps(document), "some/file.json")
    for text in ("", "[]", "{"):
        with pytest.raises(UsageError):
            from_json(text, "x")


def test_i11_a_report_that_was_cut_is_called_so() -> None:
    """Wherever it ends: in a word, in a number, in a name."""
    text = '{"a": true, "b": [-1.5e-3, null], "c": {"d": false, "e": "x"}}'
    for length in range(len(text)):
        with pytest.raises(UsageError) as raised:
            from_json(text[:length], "x")
        assert str(raised.value) == f"x is cut: it ends within its JSON, after {length} characters"
    for wrong in ("{]", "hello", text + "}", text.replace(":", "", 1)):
        with pytest.raises(UsageError, match=r"^x is not JSON: "):
            from_json(wrong, "x")


def test_h06_text_prints_throughput_with_its_inputs() -> None:
    # three windows of 1 s, 7 requests each
    assert "concurrency 1: 21 completed / 3.000 s = 7 requests/s" in text_of(report_of(CLOSED, [[1.0] * 7]))


def test_h14_text_marks_percentiles_without_enough_samples() -> None:
    text = text_of(report_of([ClosedLoop(1)], [[1.0] * 7]))
    assert "1.00?" in text and "21 samples are too few for p99" in text


@pytest.mark.parametrize(("loads", "words"), [(CLOSED, "closed loop"), (OPEN, "open loop")])
def test_h15_every_form_names_the_mode(loads: list[ClosedLoop | OpenLoop], words: str) -> None:
    report = report_of(loads, [[1.0] * 10])
    assert words in text_of(report)
    assert words in render_html(report)
    assert json.loads(to_json(report))["mode"] == words.split()[0]
    assert {row["Mode"] for row in csv.DictReader(io.StringIO(render_csv(report)))} == {words.split()[0]}


def test_h15_modes_are_not_compared() -> None:
    with pytest.raises(UsageError, match="cannot compare a closed loop with an open loop"):
        compare(report_of(CLOSED, [[1.0]]), report_of(OPEN, [[1.0]]))


def test_h17_every_form_says_not_available() -> None:
    report = report_of(CLOSED, [[1.0] * 10])
    assert "GPU figures: not available" in text_of(report)
    assert "<dt>GPU</dt><dd>not available</dd>" in render_html(report)
    levels = json.loads(to_json(report))["levels"]
    assert levels[0]["measurements"][0]["gpu_utilisation"] is None


def test_h07_all_failed_has_no_figures_and_no_zeros_for_them() -> None:
    report = report_of([ClosedLoop(1)], [[1.0] * 5], failed=range(5))
    assert report.all_failed
    text = text_of(report)
    assert "every request failed" in text and "n/a" in text
    (row,) = csv.DictReader(io.StringIO(render_csv(report)))
    assert row["p99 latency"] == "" and row["Failed"] == "15"
    render_html(report)


def test_h04_repeats_give_median_and_spread() -> None:
    report = report_of([ClosedLoop(1)], [[1.0] * 5, [2.0] * 9, [4.0] * 7])
    (level,) = report.levels
    assert (level.throughput.median, level.throughput.low, level.throughput.high) == (7, 5, 9)
    p50 = level.latency("p50")
    assert p50 is not None and (p50.median, p50.low, p50.high) == (2, 1, 4)
    assert level.typical.throughput_rps == 7
    assert "7.00 [5.00, 9.00]" in text_of(report)


def test_h04_comparison_is_by_interval() -> None:
    old = report_of([ClosedLoop(1)], [[1.0] * 10, [2.0] * 12, [3.0] * 14])
    new = report_of([ClosedLoop(1)], [[3.0] * 20, [4.0] * 24, [5.0] * 28])
    changes = {change.figure: change for change in compare(old, new).changes}
    assert changes["requests/s"].ratio == 2.0 and changes["requests/s"].overlap is False
    assert changes["p50 ms"].ratio == 2.0 and changes["p50 ms"].overlap is True  # both were 3 once


def test_h04_single_measurements_are_not_called_different() -> None:
    changes = compare(report_of(CLOSED, [[1.0] * 9]), report_of(CLOSED, [[2.0] * 9])).changes
    latencies = [change for change in changes if change.figure == "p50 ms"]
    assert [(change.ratio, change.overlap) for change in latencies] == [(2.0, None)] * 2


def test_h07_a_comparison_tells_failures_and_other_limits() -> None:
    old = report_of(CLOSED, [[1.0] * 9])
    old = replace(old, settings=replace(old.settings, goodput_limits_ms={"request_latency": 9.0}))
    strict = replace(old.settings, goodput_limits_ms={"request_latency": 5.0})
    levels = tuple(
        replace(level, measurements=tuple(replace(one, failed=3, completed=24) for one in level.measurements))
        for level in old.levels[:1]
    )
    found = compare(old, replace(old, settings=strict, levels=levels + old.levels[1:])).differences
    assert found == (
        "failed requests at concurrency 1: 0 of 27 -> 3 of 27",
        "goodput limits: request_latency <= 9 ms -> request_latency <= 5 ms",
    )


def test_comparison_needs_a_level_in_common() -> None:
    with pytest.raises(UsageError, match="no level in common: concurrency 1 against concurrency 4"):
        compare(report_of([ClosedLoop(1)], [[1.0]]), report_of([ClosedLoop(4)], [[1.0]]))


def test_csv_has_perf_analyzers_columns_in_microseconds() -> None:
    (row, _) = csv.DictReader(io.StringIO(render_csv(report_of(CLOSED, [[2.5] * 100]))))
    assert (row["Concurrency"], row["Inferences/Second"], row["p99 latency"]) == ("1", "100.000", "2500")
    assert (row["Avg latency"], row["Server Queue"], row["Stable"]) == ("2500", "1000", "true")
    (row, _) = csv.DictReader(io.StringIO(render_csv(report_of(OPEN, [[2.5] * 100]))))
    assert (row["Request Rate"], row["Achieved Request Rate"]) == ("100", "100.000")


class _Page(HTMLParser):
    """Checks that tags nest, and collects what would leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


@pytest.mark.parametrize(
    "report",
    [
        report_of(CLOSED, [[1.0, 2.0, 300.0] * 40], GOODPUT),
        report_of(OPEN, [[1.0] * 10, [2.0] * 11], failed=(1,)),
        report_of([ClosedLoop(7)], [[1.0]]),
        report_of([ClosedLoop(2**power) for power in range(12)], [[1.0] * 10]),
    ],
)
def test_html_is_one_self_contained_well_formed_page(report: Report) -> None:
    text = render_html(report)
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.links == [] and "script" not in page.tags and "url(" not in text and "@import" not in text
    assert page.tags.count("figure") == 4
    assert "nan" not in re.sub(r"<style>.*</style>", "", text, flags=re.S).lower().replace("finance", "")


def test_html_escapes_what_the_server_says() -> None:
    text = render_html(report_of([ClosedLoop(1)], [[1.0] * 5], failed=(1,)))
    assert "<script>" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "fake<b>" not in text and "fake&lt;b&gt;" in text
    assert "random &amp; inputs" in text


def test_tick_labels_do_not_touch() -> None:
    text = render_html(report_of([ClosedLoop(n) for n in range(1, 40)], [[1.0] * 5]))
    svg = text.split('aria-label="Throughput against load"')[1].split("</svg>")[0]
    labels = re.findall(r'<text class="tick" text-anchor="middle" x="([\d.]+)" y="[\d.]+">([^<]+)</text>', svg)
    spans = [(float(x) - len(label) * 3.3, float(x) + len(label) * 3.3) for x, label in labels]
    assert len(spans) > 5
    assert all(left[1] < right[0] for left, right in pairwise(spans))


def test_ticks_by_hand() -> None:
    assert round_ticks(9) == (0, 2, 4, 6, 8, 10)
    assert round_ticks(100) == (0, 20, 40, 60, 80, 100)
    assert round_ticks(0) == (0, 1)
    assert log_ticks(0.7, 23) == pytest.approx((0.5, 1, 2, 5, 10, 20, 50))


@given(st.floats(1e-9, 1e12))
def test_axis_encloses_its_values(highest: float) -> None:
    axis = linear_axis("x", highest)
    assert axis.ticks[-1] >= highest * (1 - 1e-6)
    assert 2 <= len(axis.ticks) <= 7
    assert axis.ticks[-2] < highest


@pytest.mark.parametrize(
    ("value", "short", "column"),
    [
        (0, "0", "0"),
        (1, "1", "1.00"),
        (0.0123456, "0.0123", "0.0123"),
        (3.7, "3.7", "3.70"),
        (99.95, "100", "100"),
        (123.6, "124", "124"),
        (12345.6, "12,346", "12,346"),
    ],
)
def test_numbers_for_people(value: float, short: str, column: str) -> None:
    assert (number(value), figure(value)) == (short, column)


def test_plain_table_aligns_numbers_right_and_words_left() -> None:
    assert plain_table([["load", "model"], ["1", "a"], ["16", "longer"]]) == [
        "load  model",
        "   1  a",
        "  16  longer",
    ]
