"""Clients of a Triton server: one interface over gRPC and HTTP, with inputs checked before they are sent."""

from clients.async_grpc import AsyncGrpcClient
from clients.async_http import AsyncHttpClient
from clients.async_streams import AsyncTextStream
from clients.canary import VersionSplit
from clients.errors import (
    ClientClosed,
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    InputError,
    InvalidRequest,
    MissingDependency,
    Overloaded,
    ServerError,
    ServerUnavailable,
    SharedMemoryError,
    StreamBroken,
)
from clients.generation import Chunk, Generation, Usage
from clients.grpc import GrpcClient
from clients.http import HttpClient
from clients.retries import RetryPolicy
from clients.shared_memory import SharedTensor
from clients.streams import TextStream
from clients.tensors import EncodedBytes, encode_fixed_width
from clients.types import ModelMetadata, TensorMetadata, check_inputs

__all__ = [
    "AsyncGrpcClient",
    "AsyncHttpClient",
    "AsyncTextStream",
    "Chunk",
    "ClientClosed",
    "ClientError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EncodedBytes",
    "EngineFailed",
    "Generation",
    "GrpcClient",
    "HttpClient",
    "InputError",
    "InvalidRequest",
    "MissingDependency",
    "ModelMetadata",
    "Overloaded",
    "RetryPolicy",
    "ServerError",
    "ServerUnavailable",
    "SharedMemoryError",
    "SharedTensor",
    "StreamBroken",
    "TensorMetadata",
    "TextStream",
    "Usage",
    "VersionSplit",
    "check_inputs",
    "encode_fixed_width",
]
