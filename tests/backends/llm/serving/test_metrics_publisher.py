"""MetricsPublisher: only what changed is sent, in order, and a server that refuses costs metrics and nothing else."""

from __future__ import annotations

import threading

import pytest

from backends.llm.serving.metrics import Series
from backends.llm.serving.metrics_publisher import MAX_PAUSE_S, MIN_PAUSE_S, MetricsPublisher, pause_after

COUNTER = Series("vllm:generation_tokens_total")
GAUGE = Series("vllm:num_requests_running")
LABELS = {"model_name": "chat", "engine": "0"}


class Server:
    """What a server holds: numbers by name and labels, changed by calls as Triton's are."""

    def __init__(self):
        self.numbers = {}
        self.kinds = {}
        self.calls = 0
        self.broken = False

    def open_family(self, name, text, kind):
        assert name not in self.kinds, "a family is made once"
        assert text
        self.kinds[name] = kind
        return Family(self, name)


class Family:
    def __init__(self, server, name):
        self.server, self.name = server, name

    def Metric(self, labels):
        key = (self.name, tuple(sorted(labels.items())))
        self.server.numbers[key] = 0.0
        return Number(self.server, key)


class Number:
    def __init__(self, server, key):
        self.server, self.key = server, key

    def _called(self):
        self.server.calls += 1
        if self.server.broken:
            raise RuntimeError("the server is gone")

    def increment(self, value):
        self._called()
        assert self.server.kinds[self.key[0]] == "counter" and value > 0
        self.server.numbers[self.key] += value

    def set(self, value):
        self._called()
        assert self.server.kinds[self.key[0]] == "gauge"
        self.server.numbers[self.key] = value


def make(numbers, report=lambda text: None):
    server = Server()
    return server, MetricsPublisher(lambda: dict(numbers), server.open_family, LABELS, report)


def key(series):
    return series.name, tuple(sorted({**LABELS, **dict(series.labels)}.items()))


def test_only_what_changed_is_sent() -> None:
    numbers = {COUNTER: 0, GAUGE: 2}
    server, publisher = make(numbers)
    publisher.flush()
    assert server.numbers == {key(COUNTER): 0, key(GAUGE): 2}, "a counter is there before it counts"
    calls = server.calls
    assert publisher.flush() == 0 and server.calls == calls
    numbers.update({COUNTER: 5})
    assert publisher.flush() == 1 and server.calls == calls + 1
    numbers.update({COUNTER: 7, GAUGE: 0})
    publisher.flush()
    assert server.numbers == {key(COUNTER): 7, key(GAUGE): 0}


def test_what_could_not_be_sent_is_sent_later() -> None:
    numbers = {COUNTER: 3}
    server, publisher = make(numbers)
    publisher.flush()
    numbers[COUNTER] = 10
    server.broken = True
    with pytest.raises(RuntimeError, match="gone"):
        publisher.flush()
    server.broken = False
    publisher.flush()
    assert server.numbers[key(COUNTER)] == 10


def test_a_series_may_come_later() -> None:
    numbers = {COUNTER: 1}
    server, publisher = make(numbers)
    publisher.flush()
    late = Series("modelkiln:spec_decode_acceptance_rate")
    numbers[late] = 0.5
    publisher.flush()
    assert server.numbers[key(late)] == 0.5


def test_the_thread_sends_and_stop_sends_the_rest() -> None:
    numbers = {COUNTER: 0, GAUGE: 1}
    server, publisher = make(numbers)
    publisher.start()
    assert server.numbers == {key(COUNTER): 0, key(GAUGE): 1}, "all series are there when start returns"
    numbers[COUNTER] = 4
    publisher.stop()
    assert server.numbers[key(COUNTER)] == 4
    assert not any(thread.name == "metrics" for thread in threading.enumerate())


def test_a_server_that_refuses_is_reported_once_and_left_alone() -> None:
    reports = []
    server, publisher = make({COUNTER: 3}, reports.append)
    server.broken = True
    publisher.start()
    publisher.stop()
    assert reports == ["metrics are no longer sent: the server is gone"]


def test_a_slow_server_is_asked_less_often() -> None:
    assert pause_after(0.0001) == MIN_PAUSE_S
    assert pause_after(0.01) == pytest.approx(2.0)
    assert pause_after(10) == MAX_PAUSE_S
