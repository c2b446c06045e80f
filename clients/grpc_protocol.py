"""Questions and answers as Triton's protobuf messages. Opens no connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clients.errors import ClientError, DeadlineExceeded, ServerError, ServerUnavailable, server_error
from clients.grpc_messages import messages
from clients.protocol import Arrays, Call, Json, Protocol, check_names
from clients.requests import InferRequest
from clients.tensors import decode_array

SERVICE = "/inference.GRPCInferenceService"
STREAM = "ModelStreamInfer"
# How gRPC's own error begins where no connection could be made: the request never left.
_NOT_CONNECTED = "failed to connect to all addresses"

CHANNEL_OPTIONS = (
    # gRPC's own limit is 4 MiB (k03); protobuf's is 2 GiB.
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    # Channels of one process to one address share a connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # A channel that found no server asks again only after this long, and fails every call until then.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The other clients know no proxy, either.
    ("grpc.enable_http_proxy", 0),
)


class GrpcProtocol(Protocol):
    def server_ready(self) -> Call[bool]:
        return Call("ServerReady", messages().ServerReadyRequest(), lambda answer: bool(answer.ready))

    def model_ready(self, model: str, version: str) -> Call[bool]:
        check_names(model, version)
        request = messages().ModelReadyRequest(name=model, version=version)
        return Call("ModelReady", request, lambda answer: bool(answer.ready))

    def server_metadata(self) -> Call[Json]:
        return Call("ServerMetadata", messages().ServerMetadataRequest(), _json)

    def model_names(self) -> Call[list[str]]:
        # The repository's index is behind an admin key.
        request = messages().ModelStatisticsRequest()
        return Call(
            "ModelStatistics", request, lambda answer: sorted({str(model.name) for model in answer.model_stats})
        )

    def model_metadata(self, model: str, version: str) -> Call[Json]:
        check_names(model, version)
        return Call("ModelMetadata", messages().ModelMetadataRequest(name=model, version=version), _json)

    def config(self, model: str, version: str) -> Call[Json]:
        check_names(model, version)
        request = messages().ModelConfigRequest(name=model, version=version)
        return Call("ModelConfig", request, lambda answer: _json(answer.config))

    def statistics(self, model: str, version: str) -> Call[list[Json]]:
        if model:
            check_names(model, version)
        request = messages().ModelStatisticsRequest(name=model, version=version)
        return Call("ModelStatistics", request, lambda answer: list(_json(answer).get("model_stats", [])))

    def infer(self, request: InferRequest) -> Call[Arrays]:
        shared = {name: place for name, place in (request.outputs or {}).items() if place} if request.outputs else {}

        def parse(answer: Any) -> Arrays:
            try:
                return _arrays(answer, shared)
            except (ValueError, StopIteration) as error:
                raise ServerError(
                    "OK", f"the answer cannot be read: {error or 'an output lacks its contents'}"
                ) from error

        return Call("ModelInfer", infer_message(request), parse, repeatable=False)

    def register_region(self, name: str, key: str, byte_size: int) -> Call[None]:
        request = messages().SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size)
        return Call("SystemSharedMemoryRegister", request, _nothing)

    def unregister_region(self, name: str) -> Call[None]:
        request = messages().SystemSharedMemoryUnregisterRequest(name=name)
        return Call("SystemSharedMemoryUnregister", request, _nothing)


def multicallable(create: Callable[..., Any], method: str) -> Any:
    """A remote procedure of a channel; `create` is the channel's `unary_unary` or `unary_stream`.

    A stream of answers is asked for with one request: for the server the client has then said all it has to say, and
    the stream ends with the answer. Its messages come as bytes, for `StreamMessages`.
    """
    if method == STREAM:
        request, read = messages().ModelInferRequest, None
    else:
        request, read = getattr(messages(), f"{method}Request"), getattr(messages(), f"{method}Response").FromString
    return create(f"{SERVICE}/{method}", request_serializer=request.SerializeToString, response_deserializer=read)


def infer_message(request: InferRequest) -> Any:
    """The `ModelInferRequest`."""
    message = messages().ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.request_id
    )
    for tensor in request.inputs:
        described = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if isinstance(tensor.data, bytes):
            message.raw_input_contents.append(tensor.data)
        else:
            _set_region(described.parameters, tensor.data)
    for name, place in (request.outputs or {}).items():
        wanted = message.outputs.add(name=name)
        if place is not None:
            _set_region(wanted.parameters, place)
    if request.timeout_us is not None:
        message.parameters["timeout"].int64_param = request.timeout_us
    return message


def _set_region(parameters: Any, place: Any) -> None:
    parameters["shared_memory_region"].string_param = place.region
    parameters["shared_memory_byte_size"].int64_param = place.byte_size
    if place.offset:
        parameters["shared_memory_offset"].int64_param = place.offset


def _arrays(answer: Any, shared: Any) -> Arrays:
    """Output arrays by name; those in shared memory have no contents in the message."""
    arrays: Arrays = {}
    contents = iter(answer.raw_output_contents)
    for output in answer.outputs:
        if output.name in shared:
            next(contents, None)
            arrays[output.name] = shared[output.name].view(tuple(output.shape))
        else:
            arrays[output.name] = decode_array(next(contents), output.datatype, tuple(output.shape))
    return arrays


def _json(message: Any) -> Json:
    from google.protobuf.json_format import MessageToDict

    answer: Json = MessageToDict(message, preserving_proto_field_name=True)
    return answer


def _nothing(answer: Any) -> None:
    return None


def rpc_error(address: str, status: str, details: str) -> ClientError:
    """The error of a call that failed with `status`, gRPC's own word for it."""
    if status == "UNAVAILABLE" and details.startswith(_NOT_CONNECTED):
        return ServerUnavailable(address, details)
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(status, f"no answer from {address} in time: {details}")
    return server_error(status, details)
