"""Clients of a Triton server: one interface over gRPC and HTTP, with inputs checked before they are sent."""

from clients.errors import ClientError, InputError, MissingDependency, ServerError, ServerUnavailable
from clients.grpc import GrpcClient
from clients.http import HttpClient
from clients.types import ModelMetadata, TensorMetadata, check_inputs

__all__ = [
    "ClientError",
    "GrpcClient",
    "HttpClient",
    "InputError",
    "MissingDependency",
    "ModelMetadata",
    "ServerError",
    "ServerUnavailable",
    "TensorMetadata",
    "check_inputs",
]
