"""Loads and unloads the models of a running server, through the routes that only the admin key opens."""

from __future__ import annotations

from compiler.errors import RepositoryError
from compiler.repository import require_model_name


class ModelControl:
    """The repository API of a server.

    Args:
        grpc_address: host:port.
        key: see `compiler.server_flags`.
        timeout_s: how long a load may take.
    """

    def __init__(self, grpc_address: str, key: str, timeout_s: float) -> None:
        self._address = grpc_address
        self._headers = {"triton-grpc-protocol-admin-key": key}
        self._timeout_s = timeout_s

    def load(self, model: str) -> None:
        """Loads a model, with the ensembles that use it and, of an ensemble, its members; returns when all are ready.

        Raises:
            RepositoryError: the server says why not.
        """
        self._call("load_model", model)

    def unload(self, model: str) -> None:
        """Unloads a model, and takes its readiness; requests that run are finished by the server later.

        With an ensemble go its members, but for those that another ensemble uses or that were loaded by name.

        Raises:
            RepositoryError: the server says why not.
        """
        self._call("unload_model", model, unload_dependents=True)

    def _call(self, method: str, model: str, **options: bool) -> None:
        require_model_name(model)  # the server would look for it outside of its repository
        import tritonclient.grpc as grpc_client
        from tritonclient.utils import InferenceServerException

        # A connection for each call: threads do not share one, and calls are rare.
        with grpc_client.InferenceServerClient(self._address) as client:
            try:
                getattr(client, method)(model, headers=self._headers, client_timeout=self._timeout_s, **options)
            except InferenceServerException as error:
                reason = " ".join(str(error.message()).split())
                raise RepositoryError(f"{method} of '{model}' failed: {reason}") from None
