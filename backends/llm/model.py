"""Triton's `llm` backend: the only file of the language models that knows Triton. See docs/serving_llm.md."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from backends.llm.serving.errors import ResponseError, response_error
from backends.llm.serving.metric_families import Kind
from backends.llm.serving.metrics_publisher import MetricSource, MetricsPublisher
from backends.llm.serving.options import ServiceOptions, check_instances
from backends.llm.serving.responses import ResponseTensors
from backends.llm.serving.service import Service
from backends.phases import report_process
from backends.shared_locks import keep_locks_to_ourselves
from compiler.errors import ModelkilnError

# How long a process that ends by itself waits before, for what it has told the server to be taken.
_QUIET_S = 0.25


class TritonPythonModel:
    """The one instance of a model version; requests are batched by its engine."""

    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, handlers=[_TritonLog()], force=True)
        report_process(args["model_name"])
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            check_instances([(group.get("count", 1), group.get("gpus", [])) for group in config["instance_group"]])
            options = ServiceOptions.from_parameters(parameters)
            self._service = Service.load(
                Path(args["model_repository"], args["model_version"]), options, on_failure=self._end_process
            )
        except ModelkilnError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        name = args["model_name"]
        labels = {"model_name": name, "engine": "0", "model": name, "version": args["model_version"]}
        snapshot = self._service.metrics.snapshot
        self._publisher = MetricsPublisher(snapshot, _metric_family, labels, pb_utils.Logger.log_error)
        self._publisher.start()
        keep_locks_to_ourselves()  # all threads that talk to the server are there now

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            channel = _Channel(request.get_response_sender())
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                parameters, timeout_us = request.parameters(), request.timeout()
            except Exception as error:  # raised on, it would fail the other requests too (f03)
                channel.send(None, response_error(error), final=True)
            else:
                self._service.submit(channel, tensors, parameters=parameters, timeout_us=timeout_us)

    def finalize(self) -> None:
        self._service.close()
        self._publisher.stop()

    def _end_process(self) -> None:
        """Ends the stub of a model whose engine has failed.

        Triton 2.51 has no way to say that a model is not ready any more. Without its process it answers requests with
        an error at once, newer versions call it not ready, and `compile serve` loads it again. Lines of the log are
        sent by a thread that nobody can wait for, so that it has a moment.
        """
        pb_utils.Logger.log_error("the engine of this model has failed: its process ends")
        self._publisher.stop()
        time.sleep(_QUIET_S)
        os._exit(1)


def _metric_family(name: str, text: str, kind: Kind) -> MetricSource:
    kinds = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}
    family: MetricSource = pb_utils.MetricFamily(name=name, description=text, kind=kinds[kind])
    return family


class _Channel:
    """A response sender of Triton as the service wants it."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, tensors: ResponseTensors | None, error: ResponseError | None, *, final: bool) -> None:
        response = None
        if error is not None:
            code = getattr(pb_utils.TritonError, error.code)
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        elif tensors is not None:
            response = pb_utils.InferenceResponse([pb_utils.Tensor(name, data) for name, data in tensors.items()])
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        if response is None:
            self._sender.send(flags=flags)
        else:
            self._sender.send(response, flags)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class _TritonLog(logging.Handler):
    """Python's log as lines of the server's."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)
