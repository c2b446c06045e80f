"""kill -9 of the model's process, again and again: errors and no silence, back in seconds, nobody else notices."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clients.async_grpc import AsyncGrpcClient
from clients.errors import ClientError
from compiler.restart_policy import QUICK_S
from compiler.stubs import Stub, living_stubs
from tests.chaos.model import BYSTANDER, MAX_MODEL_LEN, MODEL, Known
from tests.chaos.observed import regions, triton_pid
from tests.serving import Served

BACK_WITHIN_S = 5.0
_PATIENCE_S = 30.0
_TRIES = 4
STREAMS = 8


@dataclass
class KillsReport:
    """What was done and seen.

    Attributes:
        back_s: from each kill to the next right answer.
        told_s: from each kill to the error of each stream that it broke.
        whole: answers that had ended before.
        bystander: answers of the other model meanwhile.
        regions: in /dev/shm, before the first kill and after the last.
        crashes: of the server, which a dying process took with it.
    """

    back_s: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    whole: int = 0
    bystander: int = 0
    regions: tuple[int, int] = (0, 0)
    crashes: int = 0
    wrong: list[str] = field(default_factory=list)


async def run_kills(
    served: Served, known: Sequence[Known], count: int, seed: int, streams: int = STREAMS
) -> KillsReport:
    """Kills that often; the server must have been told to allow it (`--max-restarts`)."""
    report, rng = KillsReport(), random.Random(seed)
    before = regions(served.process.pid)
    server = triton_pid(served.process.pid)
    async with AsyncGrpcClient(served.grpc) as client:
        await client.metadata(MODEL)  # not to be asked for while it is down
        ended = asyncio.Event()
        bystander = asyncio.create_task(_watch_bystander(client, ended, report))
        for _ in range(count):
            tries = 0
            # On a busy machine all answers may have come before the reader's first turn: that kill tells nothing.
            while not await _kill_once(served, client, rng, rng.choice(known), report, streams) and tries < _TRIES:
                tries += 1
            report.crashes += server != (server := triton_pid(served.process.pid))
        ended.set()
        await bystander
        report.regions = (len(before), await _settled_regions(served, len(before)))
    if report.crashes:
        report.wrong.append(f"the server itself ended {report.crashes} times")
    if report.regions[0] != report.regions[1]:
        report.wrong.append(f"{report.regions[1]} regions of shared memory, {report.regions[0]} before")
    if {stub.region for stub in living_stubs(server)} != regions(served.process.pid):
        report.wrong.append("regions of shared memory are not those of the living processes")
    return report


async def _kill_once(
    served: Served, client: AsyncGrpcClient, rng: random.Random, known: Known, report: KillsReport, count: int
) -> int:
    """Returns how many streams it broke off."""
    stub = await _stub(served)
    if stub is None:
        report.wrong.append(f"the model has no process within {_PATIENCE_S:g} s of its last answer")
        return 0
    is_killed, tokens_until = asyncio.Event(), iter(range(rng.randrange(40)))

    def token_came() -> None:
        """Kills in the midst of reading: whoever waits for a turn is too late for a fast model on a busy machine."""
        if next(tokens_until, None) is None and not is_killed.is_set():
            os.kill(stub.pid, signal.SIGKILL)
            is_killed.set()

    streams = [asyncio.create_task(_long_answers(client, token_came, is_killed, report)) for _ in range(count)]
    await asyncio.wait_for(is_killed.wait(), _PATIENCE_S)
    killed = time.monotonic()
    back_s = await _back(client, known, killed)
    if back_s is None:
        report.wrong.append(f"no right answer within {_PATIENCE_S:g} s of a kill")
    else:
        report.back_s.append(back_s)
    told_s = [ended_at - killed for ended_at in await asyncio.gather(*streams) if ended_at is not None]
    report.told_s += told_s
    await asyncio.sleep(QUICK_S + 0.5)  # what dies sooner is taken for a loop, and waits longer and longer
    return len(told_s)


async def _stub(served: Served) -> Stub | None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for stub in living_stubs(triton_pid(served.process.pid)):
            if stub.model == MODEL:
                return stub
        await asyncio.sleep(0.1)
    return None


async def _long_answers(
    client: AsyncGrpcClient, token_came: Callable[[], None], is_killed: asyncio.Event, report: KillsReport
) -> float | None:
    """Reads one answer after the other until the kill.

    Returns:
        When an error ended a stream, or None where the last answer was whole.
    """
    try:
        while not is_killed.is_set():
            await asyncio.wait_for(_read_all(client, token_came), _PATIENCE_S)
            report.whole += 1
    except ClientError:
        return time.monotonic()
    except asyncio.TimeoutError:
        report.wrong.append(f"a stream was silent for {_PATIENCE_S:g} s")
    return None


async def _read_all(client: AsyncGrpcClient, token_came: Callable[[], None]) -> None:
    # With its ids each token is a response; this model's may have no text for a long time.
    options = {"max_tokens": MAX_MODEL_LEN - 3, "ignore_eos": True}
    async for _ in client.astream(MODEL, [5, 6, 7], token_ids=True, **options):
        token_came()


async def _back(client: AsyncGrpcClient, known: Known, killed: float) -> float | None:
    """Returns the seconds from the kill to the first right answer."""
    while time.monotonic() < killed + _PATIENCE_S:
        try:
            options = {"max_tokens": len(known.answer), "temperature": 0, "ignore_eos": True}
            got = await client.generate(MODEL, list(known.prompt), timeout_s=5.0, token_ids=True, **options)
        except ClientError:
            await asyncio.sleep(0.02)
            continue
        if tuple(got.token_ids or ()) == known.answer:
            return time.monotonic() - killed
    return None


async def _watch_bystander(client: AsyncGrpcClient, ended: asyncio.Event, report: KillsReport) -> None:
    while not ended.is_set():
        try:
            answer = (await client.infer(BYSTANDER, {"x": [[1.5]]}))["y"].tolist()
            if answer != [[1.5]]:
                report.wrong.append(f"the other model answered {answer}")
            report.bystander += 1
        except ClientError as error:
            report.wrong.append(f"the other model: {error}")
        await asyncio.sleep(0.01)


async def _settled_regions(served: Served, expected: int) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = regions(served.process.pid)
        if len(found) == expected and found == {stub.region for stub in living_stubs(triton_pid(served.process.pid))}:
            break
        await asyncio.sleep(0.1)
    return len(found)
