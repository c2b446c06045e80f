"""What operators see: health, metrics, the OpenAPI document."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from clients.openai_server.app import REQUESTS
from clients.openai_server.serve import GRPC_EXPERIMENTS
from tests.clients.openai_server.http_calls import call, chat, complete, steps
from tests.serving import Served


def _counted(front: Served, name: str, **labels: str) -> float:
    text = call(front, "GET", "/metrics").body.decode()
    found = 0.0
    for line_labels, value in re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.M):
        if all(f'{key}="{wanted}"' in line_labels for key, wanted in labels.items()):
            found += float(value)
    return found


def test_health_is_tritons(front: Served) -> None:
    answer = call(front, "GET", "/health")
    assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_head_is_get_without_its_body(front: Served) -> None:
    before = _counted(front, "http_requests_total", handler="/health", status="200")
    for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/nothing", 404), ("/v1/completions", 405)):
        head, get = call(front, "HEAD", path), call(front, "GET", path)
        assert (head.status, head.body) == (status, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert int(head.headers["content-length"]) > 0
    assert _counted(front, "http_requests_total", handler="/health", status="200") == before + 2


def test_h11_metrics_are_tritons_and_its_own(front: Served) -> None:
    def seen() -> list[float]:
        return [
            _counted(front, "http_requests_total", handler="/v1/chat/completions", status="200"),
            _counted(front, "http_requests_total", handler="/v1/chat/completions", status="400"),
            _counted(front, "http_requests_total", handler="none", status="404"),
            _counted(front, "openai_tokens_total", model_name="scripted", kind="completion"),
            _counted(front, "openai_time_to_first_token_seconds_count", model_name="scripted"),
        ]

    before = seen()
    chat(front, steps("a", "b", "c"), stream=True)
    chat(front, steps("a"))  # h11: a whole answer has no first token, and its duration is none
    chat(front, temperature=-1)
    call(front, "GET", "/made-up-path")
    after = seen()
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 1, 4, 1]
    text = call(front, "GET", "/metrics").body.decode()
    assert "nv_inference_request_success" in text and "made-up-path" not in text
    names = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(names) == len(set(names))


def test_the_document_describes_what_is_sent_and_what_comes_back(front: Served) -> None:
    document = call(front, "GET", "/openapi.json").json
    schemas = document["components"]["schemas"]
    for path, model in REQUESTS.items():
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert set(schemas[reference.rsplit("/", 1)[1]]["properties"]) == set(model.model_fields)
        assert {"200", "400", "401", "404", "413", "415", "503"} <= set(operation["responses"])
    assert "text/event-stream" in document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert "422" not in json.dumps(document)
    _check_references(document, document)


def _check_references(part: Any, document: Any) -> None:
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str):
            assert reference.rsplit("/", 1)[1] in document["components"]["schemas"]
        part = list(part.values())
    for value in part if isinstance(part, list) else ():
        _check_references(value, document)


def test_tokens_of_all_prompts_are_counted(front: Served) -> None:
    before = _counted(front, "openai_tokens_total", model_name="scripted", kind="prompt")
    complete(front, steps("x"), prompt=["hi", "hi"])
    assert _counted(front, "openai_tokens_total", model_name="scripted", kind="prompt") - before == 6


def test_grpc_knows_the_setting_that_makes_a_token_cheaper() -> None:
    """A gRPC that has dropped it would say so in the front end's log, and the setting has to go."""
    code = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    environment = {**os.environ, "GRPC_EXPERIMENTS": f"{GRPC_EXPERIMENTS},-unheard_of"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, check=True)
    assert re.findall(r"Unknown experiment: (\w+)", done.stderr) == ["unheard_of"]
