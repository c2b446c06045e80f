"""`make chaos`: all parts in turn, with a table of what was done and what was seen."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.fuzz import run_fuzz
from tests.chaos.kills import BACK_WITHIN_S, STREAMS, run_kills
from tests.chaos.model import Known, known_answers, publish_real_model, write_repository
from tests.chaos.signals import run_signals
from tests.chaos.streams import run_streams
from tests.serving import serve

MAX_MIB_PER_MINUTE = 1.0
Part = Callable[[argparse.Namespace, Path, Sequence[Known]], tuple[list[str], list[str]]]


def main() -> int:
    arguments = _arguments()
    failed = False
    with tempfile.TemporaryDirectory(prefix="modelkiln-chaos-") as folder:
        repository = Path(folder, "repository")
        write_repository(repository)
        known = known_answers(repository, 120, random.Random(arguments.seed))
        print(f"seed {arguments.seed}; {len(known)} prompts, {len({k.answer for k in known})} different answers")
        for name in arguments.parts:
            started = time.monotonic()
            seen, wrong = PARTS[name](arguments, repository, known)
            failed |= bool(wrong)
            print(f"\n{name}: {'FAILED' if wrong else 'passed'} in {time.monotonic() - started:.0f} s")
            print("\n".join(f"  {line}" for line in [*seen, *(f"WRONG: {each}" for each in wrong[:20])]), flush=True)
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--minutes", type=float, default=10.0, help="of the streams")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--grpc-cancels", action="store_true", help="streams are left by cancels of gRPC's own")
    parser.add_argument("--requests", type=int, default=2000, help="made up at random")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kill-streams", type=int, default=STREAMS)
    parser.add_argument(
        "--kill-tiny", action="store_true", help="the tiny model, not SmolLM2: far more tokens a second"
    )
    parser.add_argument("--signals", type=int, default=50)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return arguments


def _streams(arguments: argparse.Namespace, repository: Path, known: Sequence[Known]) -> tuple[list[str], list[str]]:
    seconds = arguments.minutes * 60
    with serve(repository, log=repository.parent / "log") as served:
        run = run_streams(
            served, known, seconds, arguments.streams, arguments.seed, grpc_cancels=arguments.grpc_cancels
        )
        report = asyncio.run(run)
    wrong = report.wrong
    for process, slope in report.mib_per_minute.items():
        if seconds >= 300 and slope > MAX_MIB_PER_MINUTE:  # shorter, and the slope is that of the warm-up
            wrong.append(f"{process} grows by {slope:.2f} MiB a minute; {MAX_MIB_PER_MINUTE:g} are allowed")
    return [
        f"{arguments.streams} streams for {seconds:g} s: " + _counted(report.counts),
        f"{report.tokens} tokens, compared with the engine alone",
        "free blocks before and after: {}, {}".format(*report.free_blocks),
        "MiB a minute: " + ", ".join(f"{name} {slope:+.2f}" for name, slope in report.mib_per_minute.items()),
    ], wrong


def _fuzz(arguments: argparse.Namespace, repository: Path, known: Sequence[Known]) -> tuple[list[str], list[str]]:
    with serve(repository, log=repository.parent / "log") as served:
        report = asyncio.run(run_fuzz(served, known, arguments.requests, arguments.seed))
    return [f"{arguments.requests} requests: {_counted(report.counts)}"], report.wrong


def _kills(arguments: argparse.Namespace, repository: Path, known: Sequence[Known]) -> tuple[list[str], list[str]]:
    log = repository.parent / "log"
    if not arguments.kill_tiny:
        repository = repository.with_name("real")
        publish_real_model(repository)
        known = known_answers(repository, 10, random.Random(arguments.seed))
    with serve(repository, "--max-restarts", "1000", log=log) as served:
        run = run_kills(served, known, arguments.kills, arguments.seed, arguments.kill_streams)
        report = asyncio.run(run)
    late = [f"back after {s:.1f} s; {BACK_WITHIN_S:g} are allowed" for s in report.back_s if s > BACK_WITHIN_S]
    return [
        f"{len(report.back_s)} of {arguments.kills} kills: back after {_range(report.back_s)}",
        f"{len(report.told_s)} streams broken off, told after {_range(report.told_s)}; {report.whole} were whole",
        f"the other model meanwhile: {report.bystander} answers",
        "regions of shared memory before and after: {}, {}".format(*report.regions),
    ], report.wrong + late


def _signals(arguments: argparse.Namespace, repository: Path, known: Sequence[Known]) -> tuple[list[str], list[str]]:
    report = run_signals(repository, arguments.signals, arguments.seed)
    codes = ", ".join(f"{code}: {times}" for code, times in sorted(report.codes.items()))
    return [f"{arguments.signals} SIGTERMs: ended after {_range(report.ended_s)}; exit codes {codes}"], report.wrong


def _range(seconds: Sequence[float]) -> str:
    if not seconds:
        return "never"
    middle = sorted(seconds)[len(seconds) // 2]
    return f"{min(seconds):.1f} to {max(seconds):.1f} s (median {middle:.1f})"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


PARTS: dict[str, Part] = {"streams": _streams, "fuzz": _fuzz, "kills": _kills, "signals": _signals}

if __name__ == "__main__":
    sys.exit(main())
