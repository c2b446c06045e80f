"""`GrpcClient`: a Triton server over gRPC, for threads."""

from __future__ import annotations

from typing import Any

from clients.base import TritonClient
from clients.errors import ClientClosed, ClientError, ServerUnavailable, StreamBroken
from clients.generation import GetOutput
from clients.grpc_messages import messages
from clients.grpc_protocol import (
    CHANNEL_OPTIONS,
    STREAM,
    GrpcProtocol,
    infer_message,
    multicallable,
    rpc_error,
)
from clients.leave import Leaver
from clients.protocol import Call
from clients.requests import InferRequest
from clients.retries import RetryPolicy
from clients.stream_messages import StreamMessages
from clients.streams import Source


class GrpcClient(TritonClient):
    """A Triton server over gRPC. A message may be as large as protobuf allows (2 GiB)."""

    _protocol = GrpcProtocol()

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._leaver = Leaver(self._start)

    def close(self) -> None:
        """Ends the streams that were left, and closes every connection; see `TritonClient.close`."""
        self._leaver.wait()
        super().close()

    def _connect(self) -> _Channel:
        return _Channel(self.url)

    def _send(self, call: Call[Any], timeout_s: float) -> Any:
        import grpc

        try:
            return self._method(call.method)(call.request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:  # what a channel raises that another thread has closed
            raise ClientClosed(self.url) from error

    def _start(self, request: InferRequest, timeout_s: float) -> _GrpcSource:
        try:
            call = self._method(STREAM)(infer_message(request), timeout=timeout_s)
        except ValueError as error:
            raise ClientClosed(self.url) from error
        return _GrpcSource(self, call, request.cancel)

    def _method(self, name: str) -> Any:
        channel: _Channel = self._connection()
        return channel.method(name)

    def _failure(self, error: Any) -> ClientError:
        """The error of a call. Triton says UNAVAILABLE of a model that is not ready, too: who answers is there."""
        status, details = error.code().name, str(error.details())
        if self._closed and status == "CANCELLED":
            return ClientClosed(self.url, sent=True)
        found = rpc_error(self.url, status, details)
        if status == "UNAVAILABLE" and not isinstance(found, ServerUnavailable) and not self._is_live():
            return ServerUnavailable(self.url, details, sent=True)
        return found

    def _is_live(self) -> bool:
        import grpc

        try:
            answer = self._method("ServerLive")(messages().ServerLiveRequest(), timeout=min(self.timeout_s, 5.0))
        except (grpc.RpcError, ServerUnavailable, ValueError):
            return False
        return bool(answer.live)


class _Channel:
    """A thread's connection and its remote procedures."""

    def __init__(self, address: str) -> None:
        messages()  # whose absence is told with a hint
        import grpc

        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._methods: dict[str, Any] = {}

    def method(self, name: str) -> Any:
        if name not in self._methods:
            create = self._channel.unary_stream if name == STREAM else self._channel.unary_unary
            self._methods[name] = multicallable(create, name)
        return self._methods[name]

    def close(self) -> None:
        self._channel.close()


class _GrpcSource(Source):
    """The responses of one stream of gRPC."""

    def __init__(self, client: GrpcClient, call: Any, cancel: InferRequest | None) -> None:
        self._client = client
        self._call = call
        self._cancel = cancel
        self._messages = StreamMessages()

    def read(self) -> GetOutput | None:
        import grpc

        try:
            message = next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            failure = self._client._failure(error)
            if isinstance(failure, ServerUnavailable) and failure.sent:
                raise StreamBroken(self._client.url, str(error.details())) from error  # type: ignore[attr-defined]
            raise failure from error
        return self._messages.read(message)

    def skip_rest(self) -> None:
        import grpc

        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            pass

    def drop(self) -> None:
        self._call.cancel()

    def cancel(self) -> None:
        if self._cancel is None:
            self.drop()
        else:
            self._client._leaver.leave(self, self._cancel)
