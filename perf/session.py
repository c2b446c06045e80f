"""From the words of a command to what `measure` takes: asks the server about the model, prepares requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from clients.base import TritonClient
from clients.errors import ClientError, InputError, ServerError, ServerUnavailable
from clients.grpc import GrpcClient
from clients.http import HttpClient
from clients.types import ModelMetadata
from perf.errors import PerfError, ServerUnreachable, UsageError
from perf.input_data import read_input_data
from perf.load_generator import Target
from perf.report import Subject
from perf.server_stats import (
    PYTHON,
    CounterReader,
    Counters,
    calls_per_request,
    ensemble_steps,
    parse_counters,
)
from perf.workload import (
    DISTINCT_PAYLOADS,
    GENERATORS,
    GeneratorOptions,
    Workload,
    batch_samples,
    generate_samples,
    serialise,
)


@dataclass(frozen=True)
class Question:
    """What is to be measured, in the user's words.

    Attributes:
        input_data: "random", "zero" or the path of a file.
        generator: how inputs are made up; its `kind` is taken from `input_data`.
    """

    model: str
    target: Target
    version: str = ""
    batch_size: int = 1
    input_data: str = "random"
    generator: GeneratorOptions = field(default_factory=GeneratorOptions)


@dataclass(frozen=True)
class Session:
    """What `perf.report.measure` takes; valid while the `open_session` block lasts."""

    subject: Subject
    target: Target
    workload: Workload
    counters: CounterReader


@contextmanager
def open_session(question: Question) -> Iterator[Session]:
    """Ask the server about the model and serialise the requests.

    Raises:
        UsageError: the server has no such model, or the inputs do not fit it.
        ServerUnreachable: no server answers.
    """
    target = question.target
    client_type = GrpcClient if target.protocol == "grpc" else HttpClient
    with client_type(target.address, timeout_s=target.timeout_s) as client:
        try:
            yield _prepare(client, question)
        except ServerUnavailable as error:
            raise ServerUnreachable(str(error)) from error
        except InputError as error:
            raise UsageError(str(error)) from error
        except ClientError as error:
            raise PerfError(str(error)) from error


def _prepare(client: TritonClient, question: Question) -> Session:
    server = client.server_metadata()
    metadata = find_model(client, question.model, question.version, question.target.address)
    config = client.config(question.model, question.version)
    calls = calls_per_request(question.model, client.config)
    configs = {model: client.config(model) for model in calls}
    ensembles = tuple(model for model, found in configs.items() if ensemble_steps(found))
    # Which models a Python model calls stands in its code alone: those that work when it does are shown.
    asked = ("",) if any(found.get("backend") == PYTHON for found in configs.values()) else tuple(configs)

    def read_counters() -> list[Counters]:
        # Only the version that is measured, and of all other models every version that is loaded.
        try:
            found = parse_counters([entry for model in asked for entry in client.statistics(model)])
        except ClientError:
            return []  # a server that dies under load must not take the measurement with it
        return [one for one in found if one.model != question.model or question.version in ("", one.version)]

    workload = build_workload(metadata, question)
    subject = Subject(
        model=question.model,
        version=question.version or ", ".join(metadata.versions),
        platform=str(config.get("backend") or config.get("platform") or "unknown"),
        protocol=question.target.protocol,
        address=question.target.address,
        server=f"{server.get('name', 'unknown')} {server.get('version', '')}".strip(),
        batch_size=question.batch_size,
        workload=workload.description,
        ensembles=ensembles,
    )
    return Session(subject, question.target, workload, CounterReader(read_counters, calls))


def build_workload(metadata: ModelMetadata, question: Question) -> Workload:
    """Requests for the model, serialised for the target's protocol."""
    if question.input_data in GENERATORS:
        generator = replace(question.generator, kind=question.input_data)
        samples = generate_samples(metadata, generator, DISTINCT_PAYLOADS * question.batch_size)
        source = f"{question.input_data} inputs"
    else:
        samples = read_input_data(Path(question.input_data), metadata)
        source = f"{len(samples)} samples of {Path(question.input_data).name}"
    requests = batch_samples(metadata, samples, question.batch_size)
    payloads = serialise(metadata, requests, question.target.protocol, question.target.address, question.version)
    size = sum(map(len, payloads)) / len(payloads)
    return Workload(
        payloads=payloads,
        batch_size=question.batch_size,
        description=f"{source}, {len(payloads)} distinct requests of {size:.0f} bytes on average",
    )


def find_model(client: TritonClient, model: str, version: str, address: str) -> ModelMetadata:
    """The model's metadata; raises `UsageError` with what the server has where it is not ready or unknown."""
    try:
        return client.metadata(model, version)
    except ServerError as error:
        names = _model_names(client)
        if names is not None and model not in names:
            message = f"no model {model!r} at {address}; its models: {', '.join(names) or 'none'}"
        elif version:
            message = f"model {model!r} has no version {version!r} that is ready: {error.message}"
        else:
            message = f"model {model!r} is not ready at {address}: {error.message}"
        raise UsageError(message) from error


def _model_names(client: TritonClient) -> list[str] | None:
    """The names of the server's models; None where it keeps them to itself, as `compile serve` does without its key."""
    try:
        return client.model_names()
    except ServerError:
        return None
