"""From the words of a command to what `measure_llm` takes: asks the server about the model, makes payloads."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clients.errors import ClientError, InputError, ServerUnavailable
from clients.grpc import GrpcClient
from perf.errors import PerfError, ServerUnreachable, UsageError
from perf.llm.grpc_stream import GrpcStreamSender, read_grpc
from perf.llm.measurement import Wire
from perf.llm.payloads import Asking, grpc_payload, openai_payload
from perf.llm.prompts import PromptOptions, make_requests
from perf.llm.report import LlmSubject
from perf.llm.sse import SseSender, read_sse
from perf.load_generator import Target
from perf.session import find_model

ENDPOINTS = ("grpc", "openai")


@dataclass(frozen=True)
class LlmQuestion:
    """What is to be measured, in the user's words.

    Attributes:
        endpoint: "grpc" (Triton's stream) or "openai" (an HTTP server with that API).
        address: `host:port`.
        api_key: for "openai"; None sends none.
        salt: another for each run, or prompts of the same seed are in the server's prefix cache from the run before.
    """

    model: str
    endpoint: str
    address: str
    prompts: PromptOptions
    version: str = ""
    streamed: bool = True
    timeout_s: float = 300.0
    api_key: str | None = None
    salt: str = ""


@dataclass(frozen=True)
class LlmSession:
    """What `measure_llm` takes."""

    subject: LlmSubject
    wire: Wire
    payloads: Iterator[bytes]


def open_llm_session(question: LlmQuestion) -> LlmSession:
    """Ask the server about the model.

    Raises:
        UsageError: the server has no such model, or it does not take such prompts.
        ServerUnreachable: no server answers.
    """
    chat = question.prompts.kind == "chat"
    if question.endpoint == "grpc":
        if chat:
            raise UsageError("--prompts is 'chat', which needs --endpoint openai; allowed for grpc: tokens, text")
        return _grpc_session(question)
    if question.version:
        raise UsageError(f"--model-version is {question.version!r}; the OpenAI API has no versions: leave it out")
    target = Target(question.address, "http", question.timeout_s)
    server = _openai_server(question)
    asking = Asking(
        question.model,
        stream=question.streamed,
        ignore_eos=question.prompts.ignore_eos,
        address=target.address,
        chat=chat,
        api_key=question.api_key,
        salt=question.salt,
    )
    payloads = (openai_payload(request, asking) for request in make_requests(question.prompts))
    wire = Wire(lambda: SseSender(target.address, target.timeout_s), read_sse)
    return LlmSession(_subject(question, "", server), wire, payloads)


def _grpc_session(question: LlmQuestion) -> LlmSession:
    target = Target(question.address, "grpc", question.timeout_s)
    with GrpcClient(target.address, timeout_s=min(question.timeout_s, 60.0)) as client:
        try:
            metadata = find_model(client, question.model, question.version, target.address)
            server = client.server_metadata()
        except ServerUnavailable as error:
            raise ServerUnreachable(str(error)) from error
        except InputError as error:
            raise UsageError(str(error)) from error
        except ClientError as error:
            raise PerfError(str(error)) from error
    inputs = frozenset(tensor.name for tensor in metadata.inputs)
    outputs = frozenset(tensor.name for tensor in metadata.outputs)
    wanted = "input_ids" if question.prompts.kind == "tokens" else "text_input"
    for name, found in ((wanted, inputs), ("sampling_parameters", inputs), ("num_output_tokens", outputs)):
        if name not in found:
            raise UsageError(
                f"model {question.model!r} has no tensor {name!r}, which a language model has for --prompts "
                f"{question.prompts.kind}; it has {', '.join(sorted(inputs | outputs))}"
            )
    asking = Asking(
        question.model,
        question.version,
        question.streamed,
        question.prompts.ignore_eos,
        inputs,
        salt=question.salt,
    )
    payloads = (grpc_payload(request, asking) for request in make_requests(question.prompts))
    wire = Wire(lambda: GrpcStreamSender(target.address, target.timeout_s), read_grpc)
    name = f"{server.get('name', 'unknown')} {server.get('version', '')}".strip()
    return LlmSession(_subject(question, question.version or ", ".join(metadata.versions), name), wire, payloads)


def _subject(question: LlmQuestion, version: str, server: str) -> LlmSubject:
    return LlmSubject(question.model, version, question.endpoint, question.address, server, str(question.prompts))


def _openai_server(question: LlmQuestion) -> str:
    """What the server calls itself; refuses a model that it does not have."""
    headers = {"Authorization": f"Bearer {question.api_key}"} if question.api_key else {}
    request = urllib.request.Request(f"http://{question.address}/v1/models", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the load knows no proxy, either
    try:
        with direct.open(request, timeout=min(question.timeout_s, 60.0)) as response:
            document: Any = json.load(response)
            server = str(response.headers.get("Server") or "unknown")
        names = sorted(str(model["id"]) for model in document["data"])
    except urllib.error.HTTPError as error:
        raise PerfError(f"http://{question.address}/v1/models answered {error.code} {error.reason}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ServerUnreachable(
            f"no server at {question.address} ({reason}); start one: compile serve --openai-port 9000"
        ) from error
    except http.client.HTTPException as error:  # IncompleteRead, mostly
        raise PerfError(f"the answer of http://{question.address}/v1/models broke off: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PerfError(f"http://{question.address}/v1/models did not list models: is it an OpenAI API?") from error
    if question.model not in names:
        known = ", ".join(names) or "none"
        raise UsageError(f"no model {question.model!r} at {question.address}; its models: {known}")
    return server
