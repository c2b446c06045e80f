"""Time left and the part done, from figures; test_cli.py looks at a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from compiler.progress import Estimate, Moment, expected_seconds, is_live, terminal_stages

EXPECTED = {"load": 4.0, "export": 10.0, "publish": 1.0}


@pytest.mark.parametrize(
    ("finished", "now", "left", "fraction"),
    [
        ((), Moment("load", 1.0), 3 + 10 + 1, 1 / 15),
        (("load",), Moment("export", 2.0), 8 + 1, 6 / 15),
        (("load",), Moment("export", 2.0, 3, 4, 2.0), 8 + 1, 6 / 15),  # an earlier build knows better than steps
        (("load",), Moment("export", 13.0, 2, 4, 12.0), 12 - 1 + 1, 14 / 15),  # slower than it was: by steps
        (("load",), Moment("export", 11.0), None, 14 / 15),  # nobody knows
        (("load", "export"), Moment("publish", 0.5), 0.5, 14.5 / 15),
        (("load",), Moment("serve", 3.0, 1, 2, 2.0), 2 - 1 + 10 + 1, (1 + 0.5) / 3),
        (("load",), Moment("serve", 9.0, 1, 2, 2.0), 0 + 10 + 1, (1 + 0.5) / 3),
        (("load",), Moment("serve", 2.0), None, 1 / 3),
    ],
)
def test_what_is_left_and_what_is_done(finished, now, left, fraction):
    estimate = Estimate(EXPECTED, total=3)
    assert estimate.seconds_left(finished, now) == left
    assert estimate.fraction(finished, now) == pytest.approx(fraction)


def test_without_an_earlier_build_stages_are_counted():
    estimate = Estimate({}, total=4)
    assert estimate.seconds_left((), Moment("load", 1.0)) is None
    assert estimate.fraction(("load",), Moment("export", 1.0, 1, 2, 1.0)) == pytest.approx(1.5 / 4)


def test_the_newest_time_counts_and_the_caches_is_passed_over():
    def stage(name, seconds, from_cache=False):
        return {"name": name, "seconds": seconds, "from_cache": from_cache}

    newest = {"stages": [stage("load", 0.1, True), stage("export", 9.0)]}
    older = {"stages": [stage("load", 4.0), stage("export", 12.0)]}
    assert expected_seconds([newest, {}, older]) == {"load": 4.0, "export": 9.0}


@pytest.mark.parametrize(
    ("terminal", "environment", "live"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_only_a_terminal_without_no_color_is_live(monkeypatch, terminal, environment, live):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_live(Console(file=io.StringIO(), force_terminal=terminal)) is live


def test_a_pipe_gets_plain_lines_in_order():
    out = io.StringIO()
    stage = terminal_stages("m", Console(file=out, force_terminal=False), 2)
    with stage("load") as log:
        log.step(1, 2)
        log.note("a note")
    with stage("publish") as log:
        log.from_cache = True
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("m: [1/2] load ") and lines[0].endswith(" s") and lines[1] == "    a note"
    assert lines[2].startswith("m: [2/2] publish ") and lines[2].endswith(" s  from the cache")
    assert len(lines) == 3


def test_a_stage_that_fails_prints_no_line_of_success():
    out = io.StringIO()
    stage = terminal_stages("m", Console(file=out, force_terminal=False), 2)
    with pytest.raises(ValueError, match="broken"), stage("load"):
        raise ValueError("broken")
    assert out.getvalue() == ""


def test_a_terminal_sees_the_stage_a_bar_and_the_time_left():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    stage = terminal_stages("m", console, 3, {"load": 600.0, "export": 60.0})
    with stage("load") as log:
        log.step(0, 4)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "m: [1/3] load 0/4 ━━━━━━━━━━━━━━━━━━━━━━━━ 11:00 left" in text
