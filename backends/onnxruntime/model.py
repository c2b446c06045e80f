"""Triton's `onnxruntime` backend in Python: the same name, files and parameters as the C++ one.

A repository that says `backend: "onnxruntime"` runs here where only the Python backend exists, and
unchanged on a full Triton image, where the C++ backend of that name takes over.
"""

import json
from pathlib import Path

import batching
import onnxruntime as ort
import phases
import shared_locks
import triton_python_backend_utils as pb_utils

# The C++ backend's meaning of `optimization { graph { level } }`.
_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class TritonPythonModel:
    """One instance of one model version."""

    def initialize(self, args):
        name = args["model_name"]
        phases.report_process(name)
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        file = config.get("default_model_filename", "")
        path = folder / (file if file.endswith(".onnx") else "model.onnx")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"{path.name} is missing in version folder {folder.name}")
        with phases.phase(name, "load"):  # reads, optimises and prepares in one call
            options = _session_options(config)
            self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.batched = config["max_batch_size"] > 0
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.strings = {i.name for i in self.session.get_inputs() if i.type == "tensor(string)"}
        self.outputs = [o.name for o in self.session.get_outputs()]
        shared_locks.keep_locks_to_ourselves()

    def execute(self, requests):
        return batching.answer(requests, self.inputs, self.outputs, self.batched, self._run, self.strings)

    def finalize(self):
        self.session = None

    def _run(self, feed):
        return self.session.run(self.outputs, feed)


def _session_options(config):
    parameters = batching.parameters_of(config)
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    if parameters.get("execution_mode") == "1":
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = parameters.get("enable_mem_arena", "1") == "1"
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "1") == "1"
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = _GRAPH_LEVELS[level]
    options.log_severity_level = 3
    return options
