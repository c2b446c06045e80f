"""`GrpcClient`: a Triton server over gRPC, through tritonclient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from clients.base import Json, TritonClient, build_infer_inputs, import_tritonclient
from clients.errors import ServerError, ServerUnavailable

Result = TypeVar("Result")

# tritonclient lifts gRPC's 4 MiB limit only while it chooses the channel's options itself (k03). The pool of
# its own gives each thread a connection: channels to one address share one otherwise.
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcClient(TritonClient):
    """A Triton server over gRPC. A message may be as large as protobuf allows (2 GiB)."""

    def config(self, model: str, version: str = "") -> Json:
        answer: Json = self._call("get_model_config", model, version, as_json=True)
        config: Json = answer["config"]
        return config

    def statistics(self, model: str, version: str = "") -> list[Json]:
        return list(self._call("get_inference_statistics", model, version, as_json=True).get("model_stats", []))

    def server_metadata(self) -> Json:
        answer: Json = self._call("get_server_metadata", as_json=True)
        return answer

    def model_names(self) -> list[str]:
        return sorted({str(counters["name"]) for counters in self.statistics("")})

    def _model_metadata(self, model: str, version: str) -> Json:
        answer: Json = self._call("get_model_metadata", model, version, as_json=True)
        return answer

    def _server_ready(self) -> bool:
        return bool(self._call("is_server_ready"))

    def _model_ready(self, model: str, version: str) -> bool:
        return bool(self._call("is_model_ready", model, version))

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
        triton = import_tritonclient("grpc")
        connection = self._connection()
        result = self._guard(
            lambda: connection.infer(
                model,
                build_infer_inputs(triton, arrays, datatypes),
                model_version=version,
                outputs=None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs],
                request_id=request_id,
                client_timeout=timeout_s,
            )
        )
        return {tensor.name: result.as_numpy(tensor.name) for tensor in result.get_response().outputs}

    def _connect(self) -> Any:
        return import_tritonclient("grpc").InferenceServerClient(self.url, channel_args=_CHANNEL_OPTIONS)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        connection = self._connection()
        return self._guard(lambda: getattr(connection, method)(*args, client_timeout=self.timeout_s, **kwargs))

    def _guard(self, action: Callable[[], Result]) -> Result:
        """Run `action` and turn tritonclient's one exception into ours."""
        from tritonclient.utils import InferenceServerException

        try:
            return action()
        except InferenceServerException as error:
            status = str(error.status() or "ERROR").removeprefix("StatusCode.")
            message = str(error.message())
            # Triton says UNAVAILABLE of a model that is not ready, too: a server that answers is there.
            if status == "UNAVAILABLE" and not self._is_live():
                raise ServerUnavailable(self.url, message) from error
            raise ServerError(status, message) from error

    def _is_live(self) -> bool:
        from tritonclient.utils import InferenceServerException

        try:
            return bool(self._connection().is_server_live(client_timeout=min(self.timeout_s, 5.0)))
        except InferenceServerException:
            return False
