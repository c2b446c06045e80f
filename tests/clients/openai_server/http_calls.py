"""Plain HTTP, so that tests see what is really on the wire."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.serving import Served


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has exactly the keys that clients read."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    @property
    def events(self) -> list[Any]:
        """The data of the server-sent events; the last must be [DONE], which is left out."""
        assert self.headers["content-type"].startswith("text/event-stream")
        found = [part.removeprefix("data: ") for part in self.body.decode("ascii").split("\n\n")]
        assert found[-2:] == ["[DONE]", ""]
        return [json.loads(part) for part in found[:-2]]


def call(front: Served, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own; `body` may be bytes, else it is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(front.openai).netloc, timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    try:
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


def chat(front: Served, script: list[dict[str, Any]] | None = None, **fields: Any) -> Answer:
    """A chat with the scripted model."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **fields}
    if script is not None:
        body["structured_outputs"] = {"script": script}
    return call(front, "POST", "/v1/chat/completions", body)


def complete(front: Served, script: list[dict[str, Any]] | None = None, **fields: Any) -> Answer:
    """A completion by the scripted model."""
    body = {"model": "scripted", "prompt": "hi", **fields}
    if script is not None:
        body["structured_outputs"] = {"script": script}
    return call(front, "POST", "/v1/completions", body)


def steps(*texts: str, reason: str = "stop") -> list[dict[str, Any]]:
    """A script with one answer, whose last text comes with the reason."""
    found = [{"text": [text], "reason": ["None"]} for text in texts]
    found[-1]["reason"] = [reason]
    return found


def sent_inputs(answer: Answer) -> dict[str, Any]:
    """What the scripted model was given, from its answer to a request without a script."""
    choice = answer.json["choices"][0]
    inputs: dict[str, Any] = json.loads(choice["message"]["content"] if "message" in choice else choice["text"])
    inputs["sampling_parameters"] = json.loads(inputs["sampling_parameters"])
    return inputs
