"""What the clients' errors become in the OpenAI API."""

from __future__ import annotations

import pytest

from clients.errors import ClientError, DeadlineExceeded, ServerError, ServerUnavailable, StreamBroken, server_error
from clients.openai_server.errors import error_from_client

CASES: list[tuple[ClientError, int, str | None, str | None]] = [
    (server_error("ERROR", "[invalid_request:top_k] top_k is -5"), 400, "top_k", None),
    (server_error("ERROR", "[invalid_request] no"), 400, None, None),
    (server_error("ERROR", "[context_length_exceeded] 9 tokens"), 400, None, "context_length_exceeded"),
    (server_error("ERROR", "[overloaded] 64 wait"), 429, None, "overloaded"),
    (server_error("ERROR", "[deadline] too late"), 503, None, "deadline_exceeded"),
    (server_error("DEADLINE_EXCEEDED", "no answer in time"), 503, None, "deadline_exceeded"),
    (DeadlineExceeded("DEADLINE_EXCEEDED", "nothing was sent to 10.0.0.1:8001"), 503, None, "deadline_exceeded"),
    (server_error("ERROR", "[internal] KeyError in /srv/x.py"), 500, None, "internal"),
    (ServerError("INTERNAL", "/srv/x.py"), 500, None, "internal"),
    (ServerError("UNAVAILABLE", "model 'x' version 1 is at /srv"), 503, None, "unavailable"),
    (ServerError("NOT_FOUND", "unknown model"), 503, None, "unavailable"),  # it was there when it was looked up
    (server_error("ERROR", "Request for unknown model: 'm' version 1 is not at ready state"), 503, None, "unavailable"),
    (server_error("ERROR", "Stub process 'm_0_0' is not healthy."), 503, None, "unavailable"),
    (ServerUnavailable("10.0.0.1:8001", "refused"), 503, None, "unavailable"),
    (StreamBroken("10.0.0.1:8001", "its process has died"), 503, None, "unavailable"),
]


@pytest.mark.parametrize(("error", "status", "param", "code"), CASES, ids=[str(case[0])[:30] for case in CASES])
def test_every_error_has_its_status_and_tells_nothing_of_the_inside(
    error: ClientError, status: int, param: str | None, code: str | None
) -> None:
    found = error_from_client(error)
    assert (found.status, found.param, found.code) == (status, param, code)
    assert "/srv" not in found.message and "10.0.0.1" not in found.message


def test_the_field_is_the_one_that_the_client_wrote() -> None:
    fields = {"input_ids": "messages", "structured_outputs": "response_format"}
    found = {
        text: error_from_client(server_error("ERROR", f"[{text}] no"), fields).param
        for text in (
            "invalid_request:structured_outputs",
            "invalid_request:input_ids",
            "invalid_request:top_k",
            "invalid_request",
            "context_length_exceeded",
        )
    }
    assert [*found.values()] == ["response_format", "messages", "top_k", None, "messages"]
