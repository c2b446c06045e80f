"""The application: routes and what they need; the OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import fastapi
import pydantic
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from clients.async_grpc import AsyncGrpcClient
from clients.openai_server import responses
from clients.openai_server.answers import Usage
from clients.openai_server.body import BodyReader, parse_body
from clients.openai_server.embeddings import embed, embedding_response
from clients.openai_server.errors import ApiError, model_not_found, unavailable
from clients.openai_server.front import Front
from clients.openai_server.generations import Generations
from clients.openai_server.metrics import CONTENT_TYPE, RequestMetrics, all_metrics
from clients.openai_server.models import LanguageModel, Model, Models
from clients.openai_server.request_record import record_of
from clients.openai_server.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from clients.openai_server.settings import Settings
from clients.openai_server.work import unless_gone
from clients.retries import NO_RETRIES

log = logging.getLogger("modelkiln.openai")
Parsed = TypeVar("Parsed", bound=pydantic.BaseModel)

REQUESTS: dict[str, type[pydantic.BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
_READ_ERRORS = (401, 404, 408, 413, 415, 500, 503)
_QUESTION_S = 10.0  # that a question about the server may take
_TOKENIZER_THREADS = 4
_LARGE_BODY = 256 << 10  # bytes; larger ones are parsed in a thread


class Service:
    """What lives as long as the process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = RequestMetrics()
        self.bodies = BodyReader(settings.limits)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens and closes what needs an event loop."""
        self.triton = AsyncGrpcClient(self.settings.triton, _QUESTION_S, NO_RETRIES)
        self.models = Models(self.triton, self.settings.repository)
        executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="openai-tokenizer")
        self.generations = Generations(self.triton, self.models, executor, self.settings.limits.request_s)
        warm_up = asyncio.create_task(self._find_models())
        try:
            yield
        finally:
            warm_up.cancel()
            await self.triton.close()
            executor.shutdown(wait=False, cancel_futures=True)

    async def _find_models(self) -> None:
        """Loads tokenizers before the first request needs them."""
        try:
            found = await self.models.served()
            log.info("models: %s", ", ".join(model.name for model in found) or "none yet")
        except ApiError as error:
            log.info("no models yet: %s", error.message)

    async def parsed(self, request: fastapi.Request, model: type[Parsed]) -> Parsed:
        """Reads and checks a body."""
        body = await self.bodies.read(request.scope, request.receive)
        if len(body) < _LARGE_BODY:
            return parse_body(body, model, self.settings.limits)
        return await asyncio.to_thread(parse_body, body, model, self.settings.limits)


def create_app(settings: Settings) -> fastapi.FastAPI:
    """Returns the ASGI application."""
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = fastapi.FastAPI(
        title="modelkiln: the OpenAI API",
        version="1",
        lifespan=lifespan,
        docs_url=None,  # a page that loads scripts from elsewhere
        redoc_url=None,
        exception_handlers={HTTPException: _http_error},
    )
    _add_model_routes(app, service)
    _add_generation_routes(app, service)
    _add_operation_routes(app, service)
    app.openapi = lambda: _openapi(app, needs_key=bool(settings.api_key))  # type: ignore[method-assign]
    app.add_middleware(Front, metrics=service.metrics, api_key=settings.api_key)
    return app


def _add_model_routes(app: fastapi.FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=responses.ModelList, responses=responses.errors(401, 503))
    async def list_models() -> Any:
        """The models of this API: language models, and models that embed texts."""
        return {"object": "list", "data": [_card(model) for model in await service.models.served()]}

    @app.get("/v1/models/{model}", response_model=responses.ModelCard, responses=responses.errors(401, 404, 503))
    async def show_model(model: str) -> Any:
        """One model."""
        served = await service.models.served()
        found = next((_card(one) for one in served if one.name == model), None)
        if found is None:
            raise model_not_found(model, [one.name for one in served])
        return found

    @app.post(
        "/v1/embeddings",
        response_model=responses.EmbeddingResponse,
        responses=responses.errors(400, *_READ_ERRORS),
    )
    async def embeddings(request: fastapi.Request) -> Response:
        """A vector for each text."""
        wanted = await service.parsed(request, EmbeddingRequest)
        model = await service.models.embedding_model(wanted.model)
        record_of(request.scope).model = model.name
        texts = [wanted.input] if isinstance(wanted.input, str) else wanted.input
        work = embed(service.triton, model, texts, service.settings.limits.request_s)
        vectors = await unless_gone(request.receive, work, service.settings.limits.request_s)
        num_tokens = await asyncio.to_thread(model.count_tokens, texts)
        record_of(request.scope).usage = Usage(num_tokens)
        return JSONResponse(embedding_response(wanted, model, vectors, num_tokens))


def _add_generation_routes(app: fastapi.FastAPI, service: Service) -> None:
    statuses = responses.errors(400, 429, *_READ_ERRORS)
    events = {"description": "Events whose data is a chunk of the answer as JSON; the last one's is [DONE]."}
    stream: responses.Responses = {200: {"content": {"text/event-stream": {"schema": events}}}}

    @app.post("/v1/chat/completions", response_model=responses.ChatResponse, responses={**statuses, **stream})
    async def chat_completions(request: fastapi.Request) -> Response:
        """The answer to a chat; with `stream: true` as server-sent events that end with [DONE]."""
        return service.generations.chat(await service.parsed(request, ChatRequest), request.scope)

    @app.post("/v1/completions", response_model=responses.CompletionResponse, responses={**statuses, **stream})
    async def completions(request: fastapi.Request) -> Response:
        """What follows a prompt, or each of several; with `stream: true` as server-sent events."""
        return service.generations.completion(await service.parsed(request, CompletionRequest), request.scope)


def _add_operation_routes(app: fastapi.FastAPI, service: Service) -> None:
    @app.get("/health", response_model=responses.Health, responses=responses.errors(503))
    async def health() -> Any:
        """Whether Triton and all its models are ready."""
        if not await service.triton.is_ready():
            raise unavailable("the inference server is not ready")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Triton's metrics and the front end's own, for Prometheus."""
        text = await all_metrics(service.metrics, service.settings.triton_metrics)
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _card(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "modelkiln",
        "max_model_len": model.max_model_len if isinstance(model, LanguageModel) else None,
    }


async def _http_error(request: fastapi.Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    shown = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else "not_allowed")
    return JSONResponse(shown.to_json(), error.status_code, headers=error.headers)


def _openapi(app: fastapi.FastAPI, needs_key: bool) -> dict[str, Any]:
    """Returns the document; bodies are read by our own code, so their schemas are added here."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    template = "#/components/schemas/{model}"
    references, definitions = models_json_schema(
        [(model, "validation") for model in REQUESTS.values()], ref_template=template
    )
    document["components"]["schemas"].update(definitions["$defs"])
    for path, model in REQUESTS.items():
        schema = references[(model, "validation")]
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    # FastAPI's own error for parameters, which never comes: a path's parameter is any text.
    document["paths"]["/v1/models/{model}"]["get"]["responses"].pop("422")
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for operation in operations.values() if path.startswith("/v1") else ():
                operation["security"] = [{"key": []}]
    app.openapi_schema = document
    return document
