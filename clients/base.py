"""What both protocols share: a connection per thread, the metadata cache, the one `infer`.

Knows nothing of gRPC or HTTP: `clients/grpc.py` and `clients/http.py` say how a call is made.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from clients.errors import MissingDependency, ServerError, ServerUnavailable
from clients.types import ModelMetadata, check_inputs, check_outputs, metadata_from_json

Self = TypeVar("Self", bound="TritonClient")
Json = dict[str, Any]


class TritonClient(ABC):
    """A client of one server. Share it between threads freely; close it once.

    Args:
        url: `host:port`; a scheme in front is dropped.
        timeout_s: seconds that one call may take, connecting included.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        self.url = url.split("://", 1)[-1].rstrip("/")
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        # Connections are not to be shared between threads (k01): each thread gets its own.
        self._connections: dict[threading.Thread, Any] = {}
        self._metadata: dict[tuple[str, str], ModelMetadata] = {}
        self._closed = False

    @abstractmethod
    def config(self, model: str, version: str = "") -> Json:
        """The model's configuration, as the JSON form of Triton's `ModelConfig`."""

    @abstractmethod
    def statistics(self, model: str, version: str = "") -> list[Json]:
        """Triton's counters, one entry for each version of `model` that is loaded."""

    @abstractmethod
    def server_metadata(self) -> Json:
        """The server's name, version and extensions."""

    @abstractmethod
    def model_names(self) -> list[str]:
        """Names of the models that are loaded."""

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Inputs and outputs of `model`, asked for once and remembered.

        Raises:
            ServerError: the server has no such model or version.
            ServerUnavailable: no server answers.
        """
        key = (model, version)
        if key not in self._metadata:
            answer = self._model_metadata(model, version)
            # Only the config tells which inputs are optional, and whether the first dimension is a batch.
            self._metadata[key] = metadata_from_json(answer, self.config(model, version))
        return self._metadata[key]

    def is_ready(self) -> bool:
        """True when the server answers and says it is ready; False when it does not, or is not there."""
        try:
            return self._server_ready()
        except (ServerUnavailable, ServerError):
            return False

    def model_ready(self, name: str, version: str = "") -> bool:
        """True when the model can serve; False when it cannot, or is unknown.

        Raises:
            ServerUnavailable: no server answers.
        """
        try:
            return self._model_ready(name, version)
        except ServerError:
            return False

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
    ) -> dict[str, npt.NDArray[Any]]:
        """Run the model once.

        Args:
            model: model name.
            inputs: arrays, lists or scalars by input name; see `clients.types.check_inputs`.
            version: "" lets the server choose by its version policy.
            outputs: names of the outputs wanted; None means all.
            timeout_s: seconds for this call, in place of the client's own.
            request_id: comes back in the server's log and traces.

        Returns:
            Arrays by output name. BYTES outputs are object arrays of bytes.

        Raises:
            InputError: the request does not fit the model; nothing was sent.
            ServerError: the server refused or failed it, or the timeout passed.
            ServerUnavailable: no server answers.
        """
        metadata = self.metadata(model, version)
        arrays = check_inputs(metadata, inputs)
        if outputs is not None:
            check_outputs(metadata, outputs)
        datatypes = {tensor.name: tensor.datatype for tensor in metadata.inputs}
        limit = self.timeout_s if timeout_s is None else timeout_s
        return self._infer(model, version, arrays, datatypes, outputs, limit, request_id)

    def close(self) -> None:
        """Close every thread's connection. A second call does nothing; a later request raises."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _connect(self) -> Any:
        """A new connection, to be used by one thread. It has `close()` and opens no socket yet."""

    @abstractmethod
    def _model_metadata(self, model: str, version: str) -> Json: ...

    @abstractmethod
    def _server_ready(self) -> bool: ...

    @abstractmethod
    def _model_ready(self, model: str, version: str) -> bool: ...

    @abstractmethod
    def _infer(
        self,
        model: str,
        version: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        datatypes: Mapping[str, str],
        outputs: Sequence[str] | None,
        timeout_s: float,
        request_id: str,
    ) -> dict[str, npt.NDArray[Any]]: ...

    def _connection(self) -> Any:
        """This thread's connection; those of threads that have ended are closed on the way."""
        thread = threading.current_thread()
        connection = self._connections.get(thread)
        if connection is not None:
            return connection
        with self._lock:
            if self._closed:
                raise ServerUnavailable(self.url, "this client is closed")
            ended = [other for other in self._connections if not other.is_alive()]
            stale = [self._connections.pop(other) for other in ended]
            connection = self._connections[thread] = self._connect()
        for old in stale:
            old.close()
        return connection


def import_tritonclient(protocol: str) -> Any:
    """`tritonclient.<protocol>`, imported when it is first needed.

    Raises:
        MissingDependency: with the command that installs it.
    """
    try:
        return importlib.import_module(f"tritonclient.{protocol}")
    except ImportError as error:
        raise MissingDependency(
            f"this client needs tritonclient ({error}); install it: pip install 'tritonclient[grpc,http]'"
        ) from error


def build_infer_inputs(module: Any, arrays: Mapping[str, npt.NDArray[Any]], datatypes: Mapping[str, str]) -> list[Any]:
    """tritonclient's `InferInput`s for checked arrays; `module` is tritonclient.grpc or .http."""
    inputs = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), datatypes[name])
        # An array of rank 0 must keep its rank, which np.ascontiguousarray would not.
        tensor.set_data_from_numpy(np.asarray(array, order="C"))
        inputs.append(tensor)
    return inputs
