"""Triton's protobuf messages, from tritonclient."""

from __future__ import annotations

import functools
from typing import Any

from clients.errors import MissingDependency


@functools.cache
def messages() -> Any:
    """The module of Triton's messages, imported when it is first needed.

    Raises:
        MissingDependency: with the command that installs it.
    """
    try:
        from tritonclient.grpc import service_pb2
    except ImportError as error:
        raise MissingDependency(
            f"this client needs tritonclient ({error}); install it: pip install 'tritonclient[grpc,http]'"
        ) from error
    return service_pb2
