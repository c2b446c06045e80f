"""Many streams at once, some left, some malformed: each accepted one is answered to the token and ends with FINAL."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from compiler.stubs import living_stubs
from tests.chaos.model import MAX_MODEL_LEN, MODEL, Known
from tests.chaos.observed import kv_blocks, rss_bytes
from tests.chaos.wire import Outcome, ask, request_message
from tests.serving import Served

CANCELLED, MALFORMED = 0.20, 0.05
PATIENCE_S = 60.0
_WARM_UP = 0.2  # of the time, before memory is judged

MALFORMED_REQUESTS: tuple[dict[str, Any], ...] = (
    {"input_ids": [5, 6], "temperature": -1.0},
    {"input_ids": [5, 6], "max_tokens": -3},
    {"input_ids": [5, 6], "sampling_parameters": "{"},
    {"input_ids": [5, 6], "sampling_parameters": '{"no_such_field": 1}'},
    {"input_ids": [5, 6], "text_input": "both"},
    {"input_ids": [5, 999_999]},
    {"input_ids": [-1]},
    {"input_ids": [5] * (MAX_MODEL_LEN + 1)},
    {"text_input": b"\xff\xfe"},
    {"stream": True},
)


@dataclass
class StreamsReport:
    """What was done and seen.

    Attributes:
        wrong: what should not have been; empty where all is well.
        mib_per_minute: the slope of memory after a warm-up, by process.
    """

    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    free_blocks: tuple[int, int] = (0, 0)
    mib_per_minute: dict[str, float] = field(default_factory=dict)


async def run_streams(
    served: Served, known: Sequence[Known], seconds: float, streams: int, seed: int, *, grpc_cancels: bool = False
) -> StreamsReport:
    """Keeps that many streams busy for so long.

    Args:
        grpc_cancels: leaves them not by `cancel` but as gRPC does it, which the bundled server does not always survive.
    """
    report = StreamsReport(seconds)
    (stub,) = [stub for stub in living_stubs(served.triton_pid) if stub.model == MODEL]
    processes = {"tritonserver": served.triton_pid, "the model's process": stub.pid}
    before = kv_blocks(served.metrics)
    ends_at = time.monotonic() + seconds
    watch = asyncio.create_task(_memory(processes, ends_at))
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        rngs = [random.Random(f"{seed} {number}") for number in range(streams)]
        await asyncio.gather(*(_worker(channel, known, rng, ends_at, report, grpc_cancels) for rng in rngs))
    report.mib_per_minute = {name: _slope(samples) for name, samples in (await watch).items()}
    report.free_blocks = (before, await _free_again(served, before))
    if report.free_blocks[0] != report.free_blocks[1]:
        report.wrong.append(f"{report.free_blocks[1]} blocks are free, {report.free_blocks[0]} were")
    if not stub.alive:
        report.wrong.append("the model's process has died")
    return report


async def _worker(
    channel: Any,
    known: Sequence[Known],
    rng: random.Random,
    ends_at: float,
    report: StreamsReport,
    grpc_cancels: bool,
) -> None:
    while time.monotonic() < ends_at:
        dice = rng.random()
        if dice < MALFORMED:
            await _malformed(channel, rng, report)
        else:
            cancelled = dice < MALFORMED + CANCELLED
            await _answered(channel, rng, report, rng.choice(known), cancelled=cancelled, grpc_cancels=grpc_cancels)


async def _malformed(channel: Any, rng: random.Random, report: StreamsReport) -> None:
    inputs = rng.choice(MALFORMED_REQUESTS)
    outcome = await ask(channel, request_message(MODEL, inputs), patience_s=PATIENCE_S)
    report.counts["malformed"] += 1
    if not outcome.error.startswith(("[invalid_request", "[context_length_exceeded]")):
        report.wrong.append(f"{str(inputs)[:80]} was answered with {outcome}")


async def _answered(
    channel: Any, rng: random.Random, report: StreamsReport, known: Known, *, cancelled: bool, grpc_cancels: bool
) -> None:
    wanted = known.answer[: rng.randrange(1, len(known.answer) + 1)]
    inputs = {"input_ids": known.prompt, "stream": rng.random() < 0.9, "max_tokens": len(wanted)}
    inputs |= {"sampling_parameters": '{"ignore_eos": true, "temperature": 0}', "return_token_ids": True}
    inputs["return_finish_reason"] = True
    after = rng.randrange(len(wanted) + 1) if cancelled else None
    cancel = None
    if cancelled and not grpc_cancels:
        inputs["cancel_id"] = f"{rng.getrandbits(128):x}"
        cancel = request_message(MODEL, {"cancel": inputs["cancel_id"]})
    message = request_message(MODEL, inputs)
    outcome = await ask(channel, message, patience_s=PATIENCE_S, cancel_after=after, cancel=cancel)
    report.tokens += len(outcome.tokens)
    if outcome.error.startswith("[overloaded]"):
        report.counts["refused, the queue is full"] += 1
    elif outcome.cancelled:
        report.counts["cancelled"] += 1
        if tuple(outcome.tokens) != wanted[: len(outcome.tokens)]:
            report.wrong.append(f"wrong tokens before it was left: {outcome.tokens[:8]}")
        if outcome.cancel is not None and not _is_clean(outcome, outcome.cancel):
            report.wrong.append(f"a cancel: {outcome}")
    else:
        report.counts["answered"] += 1
        if tuple(outcome.tokens) != wanted or not outcome.final or outcome.finish_reason != "length":
            report.wrong.append(f"a prompt of {len(known.prompt)} and {len(wanted)} tokens: {outcome}")


def _is_clean(outcome: Outcome, cancel: Outcome) -> bool:
    """Whether an answer ended as it should that another request cancelled, which may have come too late."""
    ended = outcome.error.startswith("[cancelled]") or (outcome.final and outcome.finish_reason == "length")
    return ended and cancel.final and not cancel.error


async def _memory(processes: dict[str, int], ends_at: float) -> dict[str, list[tuple[float, int]]]:
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in processes}
    while time.monotonic() < ends_at:
        for name, pid in processes.items():
            samples[name].append((time.monotonic(), rss_bytes(pid)))
        await asyncio.sleep(0.5)
    return samples


def _slope(samples: Sequence[tuple[float, int]]) -> float:
    """MiB a minute after the warm-up: the slope of the straight line that fits best."""
    steady = np.array(samples[int(len(samples) * _WARM_UP) :])
    return float(np.polyfit(steady[:, 0] - steady[0, 0], steady[:, 1], 1)[0] * 60 / 2**20) if len(steady) > 2 else 0.0


async def _free_again(served: Served, expected: int) -> int:
    deadline = time.monotonic() + 20
    while (free := kv_blocks(served.metrics)) != expected and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return free
