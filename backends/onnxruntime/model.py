"""Triton's `onnxruntime` backend in Python: the same name, files and parameters as the C++ one.

A repository that says `backend: "onnxruntime"` runs here where only the Python backend exists, and
unchanged on a full Triton image, where the C++ backend of that name takes over.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
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
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"], args["model_version"])
        name = config.get("default_model_filename", "")
        path = folder / (name if name.endswith(".onnx") else "model.onnx")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"{path.name} is missing in version folder {folder.name}")
        self.session = ort.InferenceSession(str(path), _session_options(config), providers=["CPUExecutionProvider"])
        self.batched = config["max_batch_size"] > 0
        self.inputs = [i.name for i in self.session.get_inputs()]
        self.strings = {i.name for i in self.session.get_inputs() if i.type == "tensor(string)"}
        self.outputs = [o.name for o in self.session.get_outputs()]

    def execute(self, requests):
        feeds = [{name: self._array(request, name) for name in self.inputs} for request in requests]
        responses = [None] * len(requests)
        for group in self._groups(feeds):
            try:
                results = self._run([feeds[i] for i in group])
            except Exception as error:
                # One bad request (an id out of range, say) must not fail its batch mates.
                results = [error] if len(group) == 1 else [self._alone(feeds[i]) for i in group]
            for index, result in zip(group, results, strict=True):
                responses[index] = self._response(requests[index], result)
        return responses

    def finalize(self):
        self.session = None

    def _groups(self, feeds):
        """Returns lists of request indices that can run as one batch: equal shapes but for the first axis."""
        if not self.batched:
            return [[i] for i in range(len(feeds))]
        groups = {}
        for index, feed in enumerate(feeds):
            groups.setdefault(tuple(feed[name].shape[1:] for name in self.inputs), []).append(index)
        return list(groups.values())

    def _run(self, feeds):
        """Runs requests as one batch; returns one list of output arrays per request."""
        if len(feeds) == 1:
            return [self.session.run(self.outputs, feeds[0])]
        merged = {name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs}
        ends = np.cumsum([feed[self.inputs[0]].shape[0] for feed in feeds])[:-1]
        columns = [np.split(array, ends) for array in self.session.run(self.outputs, merged)]
        return [list(row) for row in zip(*columns, strict=True)]

    def _alone(self, feed):
        try:
            return self._run([feed])[0]
        except Exception as error:
            return error

    def _array(self, request, name):
        array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
        if name in self.strings:
            array = np.array([s.decode("utf-8") for s in array.flat], dtype=object).reshape(array.shape)
        return array

    def _response(self, request, result):
        if isinstance(result, Exception):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(_one_line(result)))
        wanted = set(request.requested_output_names())
        tensors = [
            pb_utils.Tensor(name, np.ascontiguousarray(array))
            for name, array in zip(self.outputs, result, strict=True)
            if name in wanted
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)


def _session_options(config):
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
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


def _one_line(error):
    """Returns the message without ONNX Runtime's source paths."""
    text = " ".join(str(error).split())
    return text.rsplit("Status Message: ", 1)[-1][:500]
