"""A model's way to READY, from the server's log."""

from __future__ import annotations

import pytest

from compiler.server_log import ServerLog, worth_showing
from compiler.start_times import budgets_s, model_starts, start_table

LINES = [
    (0.2, 'I1130 10:02:06.006430 2154 model_lifecycle.cc:472] "loading: chat:1"'),
    (0.3, 'I1130 10:02:06.006430 2154 model_lifecycle.cc:472] "loading: echo:1"'),
    (0.9, "modelkiln model=echo phase=process seconds=0.400"),
    (1.0, "modelkiln model=echo phase=process seconds=0.300"),  # the second of two instances
    (1.1, """I1130 10:02:06.984235 2154 model_lifecycle.cc:839] "successfully loaded 'echo'\""""),
    (1.4, "modelkiln model=chat phase=process seconds=1.1"),
    (2.4, "modelkiln model=chat phase=load seconds=0.75"),
    (2.5, "modelkiln model=chat phase=compile seconds=0.25"),
    (2.8, "modelkiln model=chat phase=tuning seconds=0.3"),
    (3.0, "modelkiln model=chat phase=warm_up seconds=0.2"),
    (3.1, """I1130 10:02:06.984235 2154 model_lifecycle.cc:839] "successfully loaded 'chat'\""""),
    (9.0, """I1130 10:02:06.984235 2154 model_lifecycle.cc:839] "successfully loaded 'chat'\""""),  # again, later
]


@pytest.fixture
def log() -> ServerLog:
    log = ServerLog()
    for at_s, line in LINES:
        log.read(line, at_s)
    return log


def test_phases_add_up_to_the_time_to_ready(log):
    chat, echo = model_starts(log, {"chat": 3.0, "echo": 1.5})
    assert (chat.model, chat.seconds, chat.late) == ("chat", 3.1, True)
    assert dict(chat.phases) == {
        **{"server": 0.2, "process": 1.1, "load": 0.75, "compile": 0.25, "warm_up": 0.2, "tuning": 0.3},
        "other": pytest.approx(0.3),
    }
    assert (echo.seconds, echo.late) == (1.1, False)
    assert dict(echo.phases) == {"server": 0.3, "process": 0.4, "other": pytest.approx(0.4)}
    assert sum(chat.phases.values()) == pytest.approx(3.1)


def test_how_long_a_model_s_first_load_took(log):
    log.read('I1130 10:02:06.006430 2154 model_lifecycle.cc:472] "loading: late:1"', 9.5)
    assert log.load_s("chat") == pytest.approx(2.9)
    assert (log.load_s("late"), log.load_s("unknown")) == (0.0, 0.0)


def test_the_table(log):
    assert start_table(model_starts(log, {"chat": 3.0})) == [
        "model  READY after  server  process  load  compile  warm_up  tuning  other      budget",
        "chat         3.1 s     0.2      1.1   0.8      0.2      0.2     0.3    0.3  3 s missed",
        "echo         1.1 s     0.3      0.4                                    0.4            ",
    ]


def test_a_missed_budget_is_told_with_the_phases(log):
    assert str(model_starts(log, {"chat": 3.0})[0]) == (
        "model 'chat' was READY 3.1 s after the server's start (server 0.2, process 1.1, load 0.8, compile 0.2, "
        "warm_up 0.2, tuning 0.3, other 0.3); its budget is 3 s"
    )


def test_the_smaller_of_two_budgets_counts():
    manifests = {
        "a": {"spec": {"serving": {"ready_within": "4s"}}},
        "b": {"spec": {"serving": {"ready_within": "500ms", "threads": 2}}},
        "c": {"spec": {}},
        "d": {},
    }
    assert budgets_s(manifests, None) == {"a": 4.0, "b": 0.5}
    assert budgets_s(manifests, 2.0) == {"a": 2.0, "b": 0.5, "c": 2.0, "d": 2.0}


def test_phase_lines_are_not_shown():
    assert not worth_showing("modelkiln model=chat phase=load seconds=0.75")
    assert worth_showing("a model's own print")
