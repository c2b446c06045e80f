"""Requests that schemathesis makes from the front end's own OpenAPI document, valid ones and broken ones.

A few for the tests; `make fuzz-api` sets MODELKILN_FUZZ_CASES to 10,000.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.clients.openai_server.http_calls import call
from tests.serving import Served

schemathesis = pytest.importorskip("schemathesis", reason="needs Python 3.11")

NUM_CASES = int(os.environ.get("MODELKILN_FUZZ_CASES", "150"))
SLOWEST_S = 2.0 if NUM_CASES > 1000 else 20.0  # in the long run alone, when the machine does nothing else
GETS, POSTS = 0.01, 1 / 3  # shares of the cases, for each operation


def _operations(front: Served) -> list[Any]:
    schema = schemathesis.openapi.from_url(front.openai.removesuffix("/v1") + "/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def test_no_request_breaks_the_front_end(front: Served) -> None:
    operations = _operations(front)
    assert len(operations) == 7
    slowest = 0.0
    statuses: dict[int, int] = {}
    for operation in operations:
        share = POSTS if operation.method.upper() == "POST" else GETS
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

        @settings(
            max_examples=max(5, round(NUM_CASES * share)),
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            deadline=None,
        )
        @given(case=cases, model=st.sampled_from(["scripted", "tiny", "embedder", None]))
        def one(case: Any, model: str | None) -> None:
            nonlocal slowest
            if isinstance(case.body, dict):
                case.body.pop("deadline_ms", None)  # one that cannot be met is a 503, as it should be
            if model is not None and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = model  # or nearly all would be refused for a model that is not there
                if model == "tiny":  # its answers are computed, and may be thousands of tokens long
                    case.body |= {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}
            started = time.perf_counter()
            response = case.call()
            slowest = max(slowest, time.perf_counter() - started)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=_checks())

        one()
    print(f"\n{sum(statuses.values())} cases, by status: {dict(sorted(statuses.items()))}, the slowest {slowest:.2f} s")
    assert statuses.get(200, 0) > NUM_CASES // 20 and statuses.get(400, 0) > NUM_CASES // 20, statuses
    assert slowest < SLOWEST_S, f"the slowest request took {slowest:.2f} s"
    assert call(front, "GET", "/health").status == 200


def _checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conforms = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
    return [not_a_server_error, *conforms]


def test_bytes_that_follow_no_schema(front: Served) -> None:
    """Valid requests with bytes changed, put in and taken out."""
    body = b'{"model":"scripted","messages":[{"role":"user","content":"hi"}],"n":1,"temperature":0.5,"stop":["x"]}'
    chance = random.Random(0)
    for _ in range(NUM_CASES):
        broken = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(broken))
            action = chance.randrange(3)
            if action == 0:
                broken[place] = chance.randrange(256)
            elif action == 1:
                broken[place:place] = chance.choice((b"\x00", b"[", b"{", b"1e999", b"-", b"\xff", b'"', b"null"))
            else:
                del broken[place]
        answer = call(front, "POST", "/v1/chat/completions", bytes(broken))
        assert answer.status in (200, 400, 404), (bytes(broken), answer)
