"""Triton's `openvino` backend in Python: the same name, files and parameters as the C++ one, on the CPU.

Beside the C++ backend's parameters it takes INFERENCE_PRECISION_HINT, which `compile` sets to what was proved, f32 or
bf16: on CPUs with bf16 OpenVINO would otherwise compute in bf16 whatever the parity was judged on.
"""

import json
from pathlib import Path

import batching
import openvino as ov
import phases
import shared_locks
import triton_python_backend_utils as pb_utils

_PROPERTIES = ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT", "INFERENCE_PRECISION_HINT")


class TritonPythonModel:
    """One instance of one model version."""

    def initialize(self, args):
        name = args["model_name"]
        phases.report_process(name)
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        file = config.get("default_model_filename", "")
        path = folder / (file if file.endswith((".xml", ".onnx")) else "model.xml")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"{path.name} is missing in version folder {folder.name}")
        parameters = batching.parameters_of(config)
        properties = {key: parameters[key] for key in _PROPERTIES if key in parameters}
        with phases.phase(name, "load"):
            graph = ov.Core().read_model(str(path))
        with phases.phase(name, "compile"):
            compiled = ov.Core().compile_model(graph, "CPU", properties)
        self.request = compiled.create_infer_request()
        self.batched = config["max_batch_size"] > 0
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        shared_locks.keep_locks_to_ourselves()

    def execute(self, requests):
        return batching.answer(requests, self.inputs, self.outputs, self.batched, self._run)

    def finalize(self):
        self.request = None

    def _run(self, feed):
        self.request.infer(feed, share_inputs=True)
        # Copied: the next call writes into the same buffers.
        return [self.request.get_tensor(name).data.copy() for name in self.outputs]
