"""MetricsPublisher: brings the numbers of a snapshot to a server's metrics, now and then and off the engine's thread.

A call into Triton from its Python stub goes to another process and takes 30 microseconds and more, and a histogram has
no call for many values at once. At 1,500 tokens a second one call for each would cost several percent of a processor.
So the parts of a histogram are counters of their own (`_bucket` with `le`, `_sum`, `_count`): the same lines on the
wire but for the type that is declared, and a flush costs one call for each number that has changed, however many values
there were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from backends.llm.serving.metric_families import COUNTERS, GAUGES, Kind, histograms
from backends.llm.serving.metrics import Series

MIN_PAUSE_S = 0.5
# A flush takes at most this share of the time, so that what it costs is bounded on any machine.
MAX_SHARE = 0.005
MAX_PAUSE_S = 5.0


class Metric(Protocol):
    """One number of the server; Triton's `pb_utils.Metric` is one."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


class MetricSource(Protocol):
    """A family of the server; Triton's `pb_utils.MetricFamily` is one."""

    def Metric(self, labels: dict[str, str]) -> Metric: ...


class MetricsPublisher:
    """Sends what has changed since the last time.

    Args:
        snapshot: the numbers as they are now, in the order in which they are to be written.
        open_family: makes a family of the server: name, help text, "counter" or "gauge".
        labels: of every number.
        report: takes what went wrong, once; serving goes on without metrics.
    """

    def __init__(
        self,
        snapshot: Callable[[], Mapping[Series, float]],
        open_family: Callable[[str, str, Kind], MetricSource],
        labels: Mapping[str, str],
        report: Callable[[str], None],
    ) -> None:
        self._snapshot = snapshot
        self._open_family = open_family
        self._labels = dict(labels)
        self._report = report
        self._declared = _declarations()
        self._families: dict[str, MetricSource] = {}
        self._metrics: dict[Series, Metric] = {}
        self._sent: dict[Series, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Sends all numbers once, so that every series is there from the start, and goes on in a thread."""
        if self._flush_or_stop():
            self._thread.start()

    def stop(self) -> None:
        """Sends the last numbers and lets go of the metrics; the families must outlive what they made."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
            self._flush_or_stop()
        self._metrics.clear()
        self._families.clear()

    def flush(self) -> int:
        """Sends what has changed; returns how many numbers that were."""
        changed = 0
        for series, value in self._snapshot().items():
            sent = self._sent.get(series)
            if value == sent:
                continue
            self._send(series, value, sent)
            self._sent[series] = value
            changed += 1
        return changed

    def _send(self, series: Series, value: float, sent: float | None) -> None:
        metric = self._metrics.get(series)
        if metric is None:
            metric = self._family(series.name).Metric(labels={**self._labels, **dict(series.labels)})
            self._metrics[series] = metric
        if self._declared[series.name][1] == "gauge":
            metric.set(value)
        elif value != (sent or 0):
            metric.increment(value - (sent or 0))

    def _family(self, name: str) -> MetricSource:
        if name not in self._families:
            text, kind = self._declared[name]
            self._families[name] = self._open_family(name, text, kind)
        return self._families[name]

    def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        while not self._stopped.wait(pause_s):
            started = time.monotonic()
            if not self._flush_or_stop():
                return
            pause_s = pause_after(time.monotonic() - started)

    def _flush_or_stop(self) -> bool:
        try:
            self.flush()
        except Exception as error:  # whatever the server raises, requests must not suffer
            self._report(f"metrics are no longer sent: {error}")
            return False
        return True


def pause_after(seconds: float) -> float:
    """Returns how long to wait after a flush that took so long."""
    return min(MAX_PAUSE_S, max(MIN_PAUSE_S, seconds / MAX_SHARE))


def _declarations() -> dict[str, tuple[str, Kind]]:
    """Returns help text and kind of everything that goes over the wire, by name."""
    plain = {family.name: (family.help, family.kind) for family in (*GAUGES, *COUNTERS)}
    parts: dict[str, tuple[str, Kind]] = {
        f"{family.name}_{part}": (f"{family.help} {text}", "counter")
        for family in histograms(max_model_len=1)
        for part, text in (("bucket", "As many as le or less."), ("sum", "All together."), ("count", "How many."))
    }
    return plain | parts
