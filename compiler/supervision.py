"""Brings back what dies under `compile serve`: the process of a model, the server itself, the OpenAI front end.

The bundled tritonserver goes on saying READY after a model's process has died, and starts no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from compiler.errors import ModelkilnError, RepositoryError
from compiler.front_end import FrontEnd
from compiler.restart_policy import WINDOW_S, Death, RestartPolicy
from compiler.server import TritonServer
from compiler.server_flags import loads_are_ours
from compiler.stubs import Stub, living_stubs

_POLL_S = 0.1
# Triton never ends the streams of a dead process. Clients ask at least every 0.75 s whether a silent stream's model is
# ready (clients/watch.py), so it is not for longer than that, however fast it could be back.
_NOT_READY_S = 1.25
# It is not ready while it loads, either. How long that takes is known from the last time; half of it is counted on.
_SURE_OF_LOAD = 0.5
# Requests that the model's other processes still compute get this long before those are ended too.
# A process that has just started may have no command line yet, by which it is known.
_SEEN_WITHIN_S = 1.0
_GRACE_S = 10.0


@dataclass
class _Record:
    """What is known of one model, or of the server."""

    ready_at: float
    deaths: list[Death] = field(default_factory=list)
    down: bool = False  # being brought back, or given up
    load_s: float = 0.0  # how long its last load took


@dataclass
class Supervisor:
    """Watches a server that is READY.

    Args:
        say: called with what a person should know, one line each.
        check: called many times a second; what it raises ends the watch.
        front: what runs beside the server.
    """

    server: TritonServer
    policy: RestartPolicy
    say: Callable[[str], None]
    check: Callable[[], None] = lambda: None
    front: FrontEnd | None = None
    _ready_at: float = field(init=False, default_factory=time.monotonic)
    _records: dict[str, _Record] = field(init=False, default_factory=dict)
    _stubs: frozenset[Stub] = field(init=False, default=frozenset())
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _ended: threading.Event = field(init=False, default_factory=threading.Event)

    def run(self) -> NoReturn:
        """Watches until the server is given up, or `check` raises.

        Raises:
            RepositoryError: the server or what runs beside it ended, and is not to be started again.
        """
        server, front = _Record(self._ready_at), _Record(self._ready_at)
        self._watch_all()
        try:
            while True:
                self.check()
                code = self.server.wait(_POLL_S)
                if code is not None:
                    self._start_again(server, "tritonserver", code, self.server.restart)
                    self._ready_at, self._records = server.ready_at, {}
                    self._watch_all()
                elif self.front is not None and (code := self.front.poll()) is not None:
                    self._start_again(front, "the OpenAI front end", code, self.front.restart)
                elif loads_are_ours(self.server.options):
                    self._look_after_models()
        finally:
            self._ended.set()

    def _look_after_models(self) -> None:
        with self._lock:
            dead = {stub for stub in self._stubs if not stub.alive}
            self._stubs -= dead
        for model in {stub.model for stub in dead}:
            lost = [stub for stub in dead if stub.model == model]
            if not self._record(model).down:
                self._answer_death(model, lost)

    def _answer_death(self, model: str, lost: list[Stub]) -> None:
        gone = f"its process {', '.join(str(stub.pid) for stub in lost)} is gone"
        if not model:
            self.say(
                f"a model whose instance groups have names of their own is damaged: {gone}; it is not brought back"
            )
            return
        record = self._record(model)
        record.down = True
        delay_s = self._delay_s(record)
        if delay_s is None:
            self.say(f"model '{model}': {gone}; {self._given_up}: it stays down and is not ready")
        else:
            later = f" in {delay_s:g} s" if delay_s else ""
            self.say(f"model '{model}': {gone}; it is loaded again{later}")
        arguments = (model, record, lost, delay_s)
        threading.Thread(target=self._bring_back, args=arguments, name=f"restart-{model}", daemon=True).start()

    def _bring_back(self, model: str, record: _Record, lost: list[Stub], delay_s: float | None) -> None:
        """Loads a model again, in a thread of its own: other models must not wait for this one."""
        pid = self.server.pid
        others = self._forget(model)
        started = time.monotonic()
        while delay_s is not None:
            quiet_s = _NOT_READY_S - _SURE_OF_LOAD * record.load_s
            problem = self._load_again(model, {*lost, *others}, max(delay_s, quiet_s))
            if self._ended.is_set() or self.server.pid != pid or self.server.wait(0) is not None:
                return  # the server has ended, and its models with it
            record.ready_at = time.monotonic()
            if not problem:
                record.down = False
                self.say(f"model '{model}' is READY again after {record.ready_at - started:.1f} s")
                break
            delay_s = self._delay_s(record)
            self.say(f"{problem}; {self._given_up if delay_s is None else f'tried again in {delay_s:g} s'}")
        if delay_s is None:
            self._try_unload(model)
        self._end_stubs(lost, others)

    def _load_again(self, model: str, before: set[Stub], pause_s: float) -> str:
        """Loads a model after a pause; returns what went wrong, or an empty string."""
        control, pid = self.server.control, self.server.pid
        try:
            control.unload(model)  # it is not ready while it waits
            if self._ended.wait(pause_s) or self.server.pid != pid:
                return ""
            started = time.monotonic()
            control.load(model)
            self._record(model).load_s = time.monotonic() - started
        except RepositoryError as error:
            return error.message
        assert pid is not None
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while len(found := {stub for stub in living_stubs(pid) if stub.model == model} - before) < len(before):
            if time.monotonic() > deadline or self._ended.wait(_POLL_S):
                break
        with self._lock:
            self._stubs |= found
        if len(found) < len(before):
            return f"model '{model}' has {len(found)} of its {len(before)} processes after it was loaded"
        return ""

    def _forget(self, model: str) -> list[Stub]:
        """Stops watching what lives of a model, and returns it."""
        with self._lock:
            others = [stub for stub in self._stubs if stub.model == model]
            self._stubs -= set(others)
        return others

    def _try_unload(self, model: str) -> None:
        try:
            self.server.control.unload(model)
        except RepositoryError as error:
            self.say(error.message)

    def _end_stubs(self, lost: Iterable[Stub], others: list[Stub]) -> None:
        """Removes what killed processes shared; their siblings may finish, and are ended where they do not."""
        for stub in lost:
            stub.remove_region()
        deadline = time.monotonic() + _GRACE_S
        while any(stub.alive for stub in others) and time.monotonic() < deadline:
            if self._ended.wait(_POLL_S):
                return
        for stub in others:
            stub.end()

    def _start_again(self, record: _Record, name: str, code: int, start: Callable[[], None]) -> None:
        """Starts a process of ours that has ended: in this thread, since the kernel ends children with their thread."""
        ended = f"{name} ended by itself with code {code}"
        while (delay_s := self._delay_s(record)) is not None:
            self.say(f"{ended}; it is started again" + (f" in {delay_s:g} s" if delay_s else ""))
            self._pause(delay_s)
            try:
                start()
            except ModelkilnError as error:
                ended = error.message
                record.ready_at = time.monotonic()
            else:
                record.ready_at = time.monotonic()
                self.say(f"{name} is READY again")
                return
        raise RepositoryError(f"{ended}; {self._given_up}", hint="run with --verbose to see the server's log")

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL_S)

    def _record(self, model: str) -> _Record:
        load_s = self.server.log.load_s(model)
        return self._records.setdefault(model, _Record(self._ready_at, load_s=load_s))

    def _delay_s(self, record: _Record) -> float | None:
        now = time.monotonic()
        record.deaths.append(Death(now, now - record.ready_at))
        return self.policy.delay_s(record.deaths)

    @property
    def _given_up(self) -> str:
        if self.policy.max_restarts == 0:
            return "nothing is started again"
        return f"more than {self.policy.max_restarts} deaths within {WINDOW_S:g} s are too many"

    def _watch_all(self) -> None:
        pid = self.server.pid
        assert pid is not None
        found = living_stubs(pid)
        with self._lock:
            self._stubs = found
