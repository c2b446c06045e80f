"""`HttpClient`: a Triton server over HTTP, with binary tensors.

Bodies are written and read by tritonclient; the connection is Python's own. tritonclient's is a gevent hub
per thread, whose descriptors stay open after the thread has ended, and takes no timeout for one call.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy.typing as npt

from clients.base import Json, TritonClient, build_infer_inputs, import_tritonclient
from clients.errors import ServerError, ServerUnavailable

_HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpClient(TritonClient):
    """A Triton server over HTTP. Each thread keeps one connection open."""

    def config(self, model: str, version: str = "") -> Json:
        answer: Json = self._json(f"{_model_path(model, version)}/config")
        return answer

    def statistics(self, model: str, version: str = "") -> list[Json]:
        return list(self._json(f"{_model_path(model, version)}/stats")["model_stats"])

    def server_metadata(self) -> Json:
        answer: Json = self._json("/v2")
        return answer

    def model_names(self) -> list[str]:
        # The repository's index is behind an admin key.
        return sorted({str(counters["name"]) for counters in self._json("/v2/models/stats")["model_stats"]})

    def _model_metadata(self, model: str, version: str) -> Json:
        answer: Json = self._json(_model_path(model, version))
        return answer

    def _server_ready(self) -> bool:
        self._request("GET", "/v2/health/ready", self.timeout_s)
        return True

    def _model_ready(self, model: str, version: str) -> bool:
        self._request("GET", f"{_model_path(model, version)}/ready", self.timeout_s)
        return True

    def _infer(
        self,
        model: str,
        version: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        datatypes: Mapping[str, str],
        outputs: Sequence[str] | None,
        timeout_s: float,
        request_id: str,
    ) -> dict[str, npt.NDArray[Any]]:
        triton = import_tritonclient("http")
        body, header_length = triton.InferenceServerClient.generate_request_body(
            build_infer_inputs(triton, arrays, datatypes),
            outputs=None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs],
            request_id=request_id,
        )
        headers = {"Content-Type": "application/octet-stream"}
        if header_length is not None:
            headers[_HEADER_LENGTH] = str(header_length)
        path = f"{_model_path(model, version)}/infer"
        answer, answer_headers = self._request("POST", path, timeout_s, bytes(body), headers)
        length = answer_headers.get(_HEADER_LENGTH)
        result = triton.InferenceServerClient.parse_response_body(
            answer, header_length=None if length is None else int(length)
        )
        return {tensor["name"]: result.as_numpy(tensor["name"]) for tensor in result.get_response()["outputs"]}

    def _json(self, path: str, method: str = "GET") -> Any:
        body, _ = self._request(method, path, self.timeout_s)
        return json.loads(body)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url, timeout=self.timeout_s)

    def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, http.client.HTTPMessage]:
        """One exchange on this thread's connection; a status other than 200 raises."""
        connection: http.client.HTTPConnection = self._connection()
        reused = connection.sock is not None
        try:
            response, answer = _exchange(connection, method, path, timeout_s, body, headers or {})
        except TimeoutError as error:
            connection.close()
            raise ServerError("DEADLINE_EXCEEDED", f"no answer from {self.url} in {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            # The server may drop an idle connection at any time; that says nothing about whether it is there.
            if reused and isinstance(error, (ConnectionError, http.client.RemoteDisconnected)):
                return self._request(method, path, timeout_s, body, headers)
            raise ServerUnavailable(self.url, str(error) or type(error).__name__) from error
        if response.status != 200:
            raise ServerError(str(response.status), _error_text(answer) or response.reason)
        return answer, response.headers


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    timeout_s: float,
    body: bytes,
    headers: Mapping[str, str],
) -> tuple[http.client.HTTPResponse, bytes]:
    connection.timeout = timeout_s  # for a connect that is still to come
    if connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    connection.request(method, path, body=body, headers=dict(headers))
    response = connection.getresponse()
    return response, response.read()


def _error_text(body: bytes) -> str:
    """Triton's `{"error": ...}`, or whatever a proxy in front of it said."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:500]


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
