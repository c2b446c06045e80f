"""What happened to each request: four numbers each, in compact arrays. Owns no statistics."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

OK = 0  # in `Records.error`; k > 0 stands for `error_kinds[k - 1]`


@dataclass(frozen=True)
class ErrorKind:
    """A way in which requests failed, with the message of the first that did."""

    kind: str
    message: str


@dataclass(frozen=True)
class Records:
    """Requests in the order in which they ended. Times are of one monotonic clock, in nanoseconds.

    Attributes:
        mode: "closed" or "open".
        intended_ns: when each was due.  # [num_requests]
        sent_ns: when it was sent; in a closed loop this is when it was due.  # [num_requests]
        done_ns: when its answer, error or timeout came.  # [num_requests]
        error: `OK`, or 1 + the index into `error_kinds`.  # [num_requests]
        error_kinds: the kinds seen.
        start_ns: the measurement began.
        end_ns: the measurement ended; requests may have been sent before and ended after.
    """

    mode: str
    intended_ns: npt.NDArray[np.int64]
    sent_ns: npt.NDArray[np.int64]
    done_ns: npt.NDArray[np.int64]
    error: npt.NDArray[np.int64]
    error_kinds: tuple[ErrorKind, ...]
    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def completed(self) -> int:
        """Requests that were answered without an error."""
        return int(np.count_nonzero(self.error == OK))

    @property
    def failed(self) -> int:
        return len(self.error) - self.completed

    @property
    def latency_ms(self) -> npt.NDArray[np.float64]:
        """Latency of the requests that succeeded, counted from when each was due.

        In an open loop a request that had to wait for the client is late by that wait, too: counting from the
        moment of sending would hide a stalled server (coordinated omission).
        """
        succeeded = self.error == OK
        latency: npt.NDArray[np.float64] = (self.done_ns[succeeded] - self.intended_ns[succeeded]) / 1e6
        return latency

    @property
    def send_lag_ms(self) -> npt.NDArray[np.float64]:
        """How long after it was due each request was sent: the client's own share of the latency."""
        lag: npt.NDArray[np.float64] = (self.sent_ns - self.intended_ns) / 1e6
        return lag

    def errors_by_kind(self) -> dict[ErrorKind, int]:
        """How many requests failed in which way, the most frequent first."""
        counts = np.bincount(self.error, minlength=len(self.error_kinds) + 1)[1:].tolist()
        pairs = sorted(zip(self.error_kinds, counts, strict=True), key=lambda pair: -pair[1])
        return {kind: count for kind, count in pairs if count}

    def window(self, start_ns: int, end_ns: int) -> Records:
        """The requests that ended in [start_ns, end_ns)."""
        inside = (self.done_ns >= start_ns) & (self.done_ns < end_ns)
        return Records(
            mode=self.mode,
            intended_ns=self.intended_ns[inside],
            sent_ns=self.sent_ns[inside],
            done_ns=self.done_ns[inside],
            error=self.error[inside],
            error_kinds=self.error_kinds,
            start_ns=start_ns,
            end_ns=end_ns,
        )

    def sent_between(self, start_ns: int, end_ns: int) -> int:
        """How many requests were sent in [start_ns, end_ns), whenever they ended."""
        return int(np.count_nonzero((self.sent_ns >= start_ns) & (self.sent_ns < end_ns)))

    def outstanding_at(self, now_ns: int) -> int:
        """How many requests that were due before `now_ns` had not ended by then."""
        return int(np.count_nonzero((self.intended_ns < now_ns) & (self.done_ns >= now_ns)))


@dataclass
class RecordBuffer:
    """Takes one line per request while the load runs; appends to flat arrays and allocates nothing else."""

    intended_ns: array[int] = field(default_factory=lambda: array("q"))
    sent_ns: array[int] = field(default_factory=lambda: array("q"))
    done_ns: array[int] = field(default_factory=lambda: array("q"))
    error: array[int] = field(default_factory=lambda: array("q"))
    _kinds: dict[str, ErrorKind] = field(default_factory=dict)
    _codes: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.done_ns)

    def add(self, intended_ns: int, sent_ns: int, done_ns: int, error: int = OK) -> None:
        self.intended_ns.append(intended_ns)
        self.sent_ns.append(sent_ns)
        self.done_ns.append(done_ns)
        self.error.append(error)

    def error_code(self, kind: str, message: str) -> int:
        """The code that stands for `kind` in `error`; the first message of a kind is kept."""
        if kind not in self._codes:
            self._codes[kind] = len(self._codes) + 1
            self._kinds[kind] = ErrorKind(kind, message)
        return self._codes[kind]

    def freeze(self, mode: str, start_ns: int, end_ns: int) -> Records:
        """A copy of what has been recorded so far."""
        return Records(
            mode=mode,
            intended_ns=np.array(self.intended_ns, dtype=np.int64),
            sent_ns=np.array(self.sent_ns, dtype=np.int64),
            done_ns=np.array(self.done_ns, dtype=np.int64),
            error=np.array(self.error, dtype=np.int64),
            error_kinds=tuple(self._kinds.values()),
            start_ns=start_ns,
            end_ns=end_ns,
        )
