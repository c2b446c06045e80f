"""SIGTERM at any moment of start and load: the command ends, and with it everything that it started."""

from __future__ import annotations

import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.observed import processes_with, regions
from tests.serving import COMPILE, FREE_PORTS, environment

LONGEST_S = 6.0
END_WITHIN_S = 20.0


@dataclass
class SignalsReport:
    """What was done and seen; `codes` are exit codes: -15 is a signal before the command listens to it."""

    codes: Counter[int] = field(default_factory=Counter)
    ended_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run_signals(repository: Path, count: int, seed: int) -> SignalsReport:
    """Starts `compile serve` that often and ends each at a random moment."""
    report, rng = SignalsReport(), random.Random(seed)
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            _start_and_end(repository, rng.uniform(0.0, LONGEST_S), f"CHAOS={seed}-{number}-{folder}", folder, report)
    return report


def _start_and_end(repository: Path, after_s: float, mark: str, folder: str, report: SignalsReport) -> None:
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [*COMPILE, "serve", str(repository), *FREE_PORTS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(**{name: value, "TMPDIR": folder}),
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    try:
        report.codes[process.wait(END_WITHIN_S)] += 1
    except subprocess.TimeoutExpired:
        report.wrong.append(f"SIGTERM after {after_s:.2f} s: it still runs after {END_WITHIN_S:g} s")
        process.kill()
        process.wait()
    report.ended_s.append(time.monotonic() - sent)
    if process.returncode not in (0, -signal.SIGTERM):
        report.wrong.append(f"SIGTERM after {after_s:.2f} s: exit code {process.returncode}")
    for what, left in (
        ("processes", processes_with(mark)),
        ("shared memory", regions(process.pid)),
        ("folders", {path.name for path in Path(folder).glob("modelkiln-*")}),
    ):
        if left:
            report.wrong.append(f"SIGTERM after {after_s:.2f} s left {what}: {left}")
