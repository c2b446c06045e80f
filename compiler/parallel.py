"""Several builds side by side, each in a process of its own whose output is kept together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TURNS_VARIABLE = "MODELKILN_TURNS"
_STOP_AFTER_S = 20  # a child that stops a server needs some of it
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may take a lock


@dataclass(frozen=True)
class Work:
    """One build to run.

    Attributes:
        arguments: of `compile`, with --json.
        needs: names whose builds must have succeeded first.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How one build ended.

    Attributes:
        exit_code: as `compile build` would have had; None where it was not started.
        result: its JSON result.
        log: what it wrote to stderr.
        lacks: the failed build that it needed, or an empty string.
    """

    name: str
    exit_code: int | None
    result: Mapping[str, Any]
    log: str
    lacks: str = ""


def run_parallel(
    work: Sequence[Work],
    num_workers: int,
    *,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    on_change: Callable[[list[str], int], None] = lambda running, waiting: None,
) -> list[Outcome]:
    """Runs builds, at most `num_workers` at once, in the order given where their needs allow it.

    One that fails stops those that need it; all others are run to their end. An interrupt stops all.

    Args:
        work: ordered by need.
        num_workers: processes at once.
        on_end: is told of each outcome as it comes.
        on_change: is told the names that run and how many wait.

    Returns:
        The outcomes in the order in which they came.
    """
    waiting, outcomes = list(work), dict[str, Outcome]()
    with tempfile.NamedTemporaryFile(prefix="modelkiln-turns-") as turns, _Children(num_workers) as children:
        environment = _environment(num_workers, Path(turns.name))
        while waiting or children.running:
            for item in list(waiting):
                lacks = next((n for n in item.needs if n in outcomes and outcomes[n].exit_code != 0), "")
                names = {w.name for w in waiting} | {w.name for w in children.running.values()}
                if lacks:
                    waiting.remove(item)
                    outcomes[item.name] = Outcome(item.name, None, {}, "", lacks)
                    on_end(outcomes[item.name])
                elif len(children.running) < num_workers and not names.intersection(item.needs):
                    waiting.remove(item)
                    children.start(item, environment)
            on_change([w.name for w in children.running.values()], len(waiting))
            for outcome in children.wait():
                outcomes[outcome.name] = outcome
                on_end(outcome)
    return list(outcomes.values())


class _Children:
    """The processes that run; leaving it ends them all."""

    def __init__(self, most: int) -> None:
        self.running: dict[concurrent.futures.Future[Outcome], Work] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(most, thread_name_prefix="build")

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            # In a session of its own a child gets no Ctrl-C from the terminal: exactly one comes, from here.
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        _, late = concurrent.futures.wait(self.running, timeout=_STOP_AFTER_S)
        if late:
            for process in self._processes:
                process.kill()
        self._pool.shutdown()

    def start(self, work: Work, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "compiler.cli", *work.arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._processes.append(process)
        self.running[self._pool.submit(_outcome, work, process)] = work

    def wait(self) -> list[Outcome]:
        """Waits for the next child to end."""
        done, _ = concurrent.futures.wait(self.running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            del self.running[future]
        return [future.result() for future in done]


def _outcome(work: Work, process: subprocess.Popen[str]) -> Outcome:
    stdout, stderr = process.communicate()
    try:
        result = json.loads(stdout)
    except ValueError:
        result = {}
    return Outcome(work.name, process.returncode, result if isinstance(result, dict) else {}, stderr)


def _environment(num_workers: int, turns: Path) -> dict[str, str]:
    """The threads that PyTorch takes are divided; ONNX Runtime and OpenVINO have no such variable."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, TURNS_VARIABLE: str(turns)}


def _die_with_parent() -> None:
    """Runs in the child: if this process is killed, the kernel stops its builds."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
