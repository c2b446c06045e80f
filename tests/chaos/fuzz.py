"""Requests that nobody should send: each gets an answer or a clear error, and the server answers as before."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio

from tests.chaos.model import MODEL, Known
from tests.chaos.wire import add_bytes, ask, request_message, text_bytes
from tests.serving import Served

PATIENCE_S = 30.0
_AT_ONCE = 8
# What no client should be told: a place in our code or on the machine, or that we did not foresee it.
_LEAKS = re.compile(r"Traceback|/tmp/|/home/|site-packages|\.py\b|\[internal")
_INPUTS = ("text_input", "input_ids", "stream", "sampling_parameters", "max_tokens", "temperature", "top_p", "top_k")
_INPUTS += ("seed", "stop", "logprobs", "priority", "deadline_ms", "client", "cache_salt", "return_token_ids", "nobody")
_TYPED = {"stream": "BOOL", "max_tokens": "INT32", "temperature": "FP32", "top_p": "FP32", "top_k": "INT32"}
_TYPED |= {"seed": "INT64", "logprobs": "INT32", "priority": "INT32", "deadline_ms": "FP32", "input_ids": "INT32"}
_TYPED |= {"return_token_ids": "BOOL"}
_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "max_tokens",
    "logprobs",
)
_PARAMETERS += ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "unknown")
_PARAMETERS += ("min_tokens", "prompt_logprobs", "guided_json", "structured_outputs", "bad_words", "best_of")
_DATATYPES = ("BYTES", "INT32", "INT64", "FP32", "FP64", "BOOL", "UINT8", "FP16", "BF16", "NONSENSE", "")
_TEXTS = (
    *("", "\0", "\ufeff", "é" * 300, "👩‍👩‍👧‍👦", "\u202eabc", "\ud7ff\ue000", "a" * 100_000, "{{ 7 * 7 }}", "%s%n"),
    *("<bos><eos>", "'; DROP TABLE", "../../etc/passwd", "\r\n\r\n", "NaN", "-0", "1e999", "١٢٣"),
)
_NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**63, -(2**63), 10**400, 0.0, -0.5, 1e308, 1e-320, 0.3, 7)


@dataclass
class FuzzReport:
    """What was sent and seen; `wrong` is empty where all is well."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def run_fuzz(served: Served, known: Sequence[Known], count: int, seed: int) -> FuzzReport:
    """Sends that many requests, half of them over gRPC and half over HTTP, and asks for known answers in between."""
    report = FuzzReport()
    numbers = iter(range(count))
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with grpc.aio.insecure_channel(served.grpc) as channel, aiohttp.ClientSession(timeout=timeout) as session:

        async def worker() -> None:
            for number in numbers:
                rng = random.Random(f"{seed} {number}")
                if number % 2:
                    await _over_grpc(channel, rng, report, f"{seed} {number}")
                else:
                    await _over_http(session, served.http, rng, report, f"{seed} {number}")
                if number % 50 == 0:
                    await _still_exact(channel, rng.choice(known), report)

        await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
        for one in known[:20]:
            await _still_exact(channel, one, report)
    return report


async def _over_grpc(channel: Any, rng: random.Random, report: FuzzReport, name: str) -> None:
    outcome = await ask(channel, fuzzed_message(rng), patience_s=PATIENCE_S)
    if outcome.silent:
        report.wrong.append(f"request {name}: no answer within {PATIENCE_S:g} s")
    elif outcome.error:
        _judge_error(report, name, outcome.error)
    elif outcome.final:
        report.counts["gRPC, answered"] += 1
    else:
        report.wrong.append(f"request {name}: it ended with neither an error nor FINAL")


def _judge_error(report: FuzzReport, name: str, text: str) -> None:
    report.counts["gRPC, error"] += 1
    if _LEAKS.search(text) or len(text) < 8:
        report.wrong.append(f"request {name}: unclear error: {text[:200]}")


async def _over_http(session: Any, address: str, rng: random.Random, report: FuzzReport, name: str) -> None:
    body, path = fuzzed_body(rng), rng.choice(("generate", "generate", "generate_stream", "infer"))
    try:
        async with session.post(f"http://{address}/v2/models/{MODEL}/{path}", data=body) as response:
            text = (await response.read()).decode(errors="replace")
    except (asyncio.TimeoutError, aiohttp.ClientError) as error:
        report.wrong.append(f"request {name}: {type(error).__name__} of {path} with {body[:80]!r}")
        return
    failed = response.status != 200 or '"error"' in text
    report.counts[f"HTTP, {'error' if failed else 'answered'}"] += 1
    if failed and (_LEAKS.search(text) or len(text) < 8):
        report.wrong.append(f"request {name}: {response.status}, unclear: {text[:200]}")


async def _still_exact(channel: Any, known: Known, report: FuzzReport) -> None:
    inputs = {"input_ids": known.prompt, "max_tokens": len(known.answer), "return_token_ids": True}
    inputs["sampling_parameters"] = '{"ignore_eos": true, "temperature": 0}'
    outcome = await ask(channel, request_message(MODEL, inputs), patience_s=PATIENCE_S)
    report.counts["known answers asked for in between"] += 1
    if tuple(outcome.tokens) != known.answer:
        report.wrong.append(f"a known answer has changed: {outcome}")


def fuzzed_message(rng: random.Random) -> Any:
    """Returns a gRPC request with up to four inputs of any type, shape and content."""
    request = request_message(MODEL, {"input_ids": [5, 6, 7], "max_tokens": 3} if rng.random() < 0.8 else {})
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name, kind = rng.choice(_INPUTS), rng.random()
        if kind < 0.6 and name in _TYPED:
            add_bytes(request, name, _TYPED[name], [1], _number_bytes(rng, _TYPED[name]))
        elif kind < 0.6:
            content = _json(rng) if name == "sampling_parameters" else rng.choice(_TEXTS).encode()
            add_bytes(request, name, "BYTES", [1], text_bytes(content))
        elif kind < 0.8:
            add_bytes(request, name, rng.choice(_DATATYPES), _shape(rng), rng.randbytes(rng.choice((0, 1, 4, 8, 64))))
        else:
            add_bytes(request, name, "BYTES", _shape(rng), rng.randbytes(rng.randrange(40)))
    return request


def _number_bytes(rng: random.Random, datatype: str) -> bytes:
    """Returns a number of the right type that is most likely out of range."""
    value = rng.choice(_NUMBERS)
    if datatype == "FP32":
        return struct.pack("<f", rng.choice((0.0, -1.0, 1e30, math.nan, math.inf, 1e-40, 0.5)))
    if datatype == "BOOL":
        return rng.choice((b"\0", b"\1", b"\7"))
    bits = 63 if datatype == "INT64" else 31
    return int(max(min(value, 2**bits - 1), -(2**bits))).to_bytes((bits + 1) // 8, "little", signed=True)


def fuzzed_body(rng: random.Random) -> bytes:
    """Returns a body for /generate: half-right JSON, wrong JSON, or no JSON at all."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.2:
        depth = rng.choice((3, 50, 400))
        return b'{"text_input": ' + b"[" * depth + b"]" * depth + b"}"
    fields: dict[str, Any] = {"text_input": rng.choice(_TEXTS), "max_tokens": 3}
    for _ in range(rng.randrange(4)):
        fields[rng.choice(_INPUTS + _PARAMETERS)] = _value(rng, 2)
    text = json.dumps(fields)
    return (text[: rng.randrange(len(text))] if kind < 0.3 else text).encode()


def _json(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice((b"", b"[]", b"null", b"{", b'{"a": 1} x', b"[" * 3000, b'{"temperature": NaN}', b"\xff"))
    values = {rng.choice(_PARAMETERS): _value(rng, 3) for _ in range(rng.randrange(1, 4))}
    return json.dumps({"max_tokens": 3, **values}).encode()


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice(_NUMBERS)
    if kind == 1:
        return rng.choice(_TEXTS[:10])[:200]
    if kind == 2:
        return rng.choice((True, False, None))
    if kind in (3, 4):
        return rng.choice((0.7, 1, 3, "3", [1, 2], ["a"], float("nan"), float("inf")))
    if kind == 5:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(_TEXTS[:8])[:50]: _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _shape(rng: random.Random) -> list[int]:
    return [rng.choice((-1, 0, 1, 2, 5, 2**40)) for _ in range(rng.choice((0, 1, 1, 1, 2, 6)))]
