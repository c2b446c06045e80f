"""A Triton backend for TensorRT-RTX engines in Python: loads `model.plan`, buffers held by torch on the instance's GPU.

Triton's own `tensorrt` backend does not load these engines: TensorRT-RTX is a sibling product. NOT RUN so far: this
file was written and its API calls checked on machines without a GPU; `tests/gpu/run.sh` is what would prove it.
"""

import json
from pathlib import Path

import numpy as np
import tensorrt_rtx as trt
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance of one model version."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], "model.plan")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"{path.name} is missing in version folder {path.parent.name}")
        if not torch.cuda.is_available():
            raise pb_utils.TritonModelException("tensorrt_rtx needs an NVIDIA GPU and a torch with CUDA")
        # An instance is told its GPU by Triton: instance_group { kind: KIND_GPU }.
        self.device = torch.device("cuda", int(args["model_instance_device_id"]))
        torch.cuda.set_device(self.device)
        self.runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise pb_utils.TritonModelException(
                f"tensorrt_rtx {trt.__version__} cannot load {path.name}: built for another GPU or version? "
                "`compile check` compares them"
            )
        self.engine = engine
        self.context = engine.create_execution_context()
        self.stream = torch.cuda.Stream(self.device)
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self.inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        self.batched = config["max_batch_size"] > 0

    def execute(self, requests):
        feeds = [{n: pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in self.inputs} for r in requests]
        responses = [None] * len(requests)
        for group in self._groups(feeds):
            try:
                results = self._run([feeds[i] for i in group])
            except Exception as error:
                results = [error] * len(group)
            for index, result in zip(group, results, strict=True):
                responses[index] = self._response(requests[index], result)
        return responses

    def finalize(self):
        # In this order: a context must not outlive its engine, nor that its runtime.
        self.context = None
        self.engine = None
        self.runtime = None

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
        merged = {n: np.concatenate([f[n] for f in feeds]) if len(feeds) > 1 else feeds[0][n] for n in self.inputs}
        arrays = self._infer(merged)
        if len(feeds) == 1:
            return [arrays]
        ends = np.cumsum([feed[self.inputs[0]].shape[0] for feed in feeds])[:-1]
        return [list(row) for row in zip(*(np.split(array, ends) for array in arrays), strict=True)]

    def _infer(self, inputs):
        context, engine = self.context, self.engine
        with torch.cuda.stream(self.stream):
            buffers = {n: torch.from_numpy(np.ascontiguousarray(a)).to(self.device) for n, a in inputs.items()}
            for name, buffer in buffers.items():
                if not context.set_input_shape(name, tuple(buffer.shape)):
                    raise ValueError(f"'{name}' {list(buffer.shape)} is outside the engine's profile")
            for name in self.outputs:
                empty = torch.from_numpy(np.empty(0, trt.nptype(engine.get_tensor_dtype(name))))
                buffers[name] = torch.empty(
                    tuple(context.get_tensor_shape(name)), dtype=empty.dtype, device=self.device
                )
            for name, buffer in buffers.items():
                context.set_tensor_address(name, buffer.data_ptr())
            if not context.execute_async_v3(self.stream.cuda_stream):
                raise RuntimeError("the engine failed; Triton's log has its message")
            arrays = [buffers[name].cpu().numpy() for name in self.outputs]
        self.stream.synchronize()
        return arrays

    def _response(self, request, result):
        if isinstance(result, Exception):
            text = " ".join(str(result).split())[:500]
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
        wanted = set(request.requested_output_names())
        tensors = [
            pb_utils.Tensor(name, np.ascontiguousarray(array))
            for name, array in zip(self.outputs, result, strict=True)
            if name in wanted
        ]
        return pb_utils.InferenceResponse(tensors)
