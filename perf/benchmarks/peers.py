"""What a model is run with where there is no compiler of ours: PyTorch, torch.compile, and both runtimes' defaults.

Each peer gets the threads that `auto` gets, and all else as it comes. ONNX Runtime and OpenVINO open the exporter's own
file, on which no pass of ours ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from compiler.dtypes import AnyArray
from compiler.targets.onnxruntime import open_session
from compiler.targets.registry import Runner


def eager(module: torch.nn.Module, output: str) -> Runner:
    """Runs the module as it is."""
    return _torch_runner(lambda tensors: module(**tensors), output)


def torch_compiled(module: torch.nn.Module, output: str) -> Runner:
    """Runs the module through torch.compile, which needs a C++ compiler, with frozen weights.

    Frozen, Inductor folds batch norms and packs the weights of its products. The mode is the default one:
    `max-autotune` takes minutes for each batch size.
    """
    from torch._inductor import config

    config.freezing = True
    compiled = torch.compile(module, dynamic=False)
    return _torch_runner(lambda tensors: compiled(**tensors), output)


def onnxruntime_default(file: Path, threads: int) -> Runner:
    """Opens the file with ONNX Runtime's own optimisations, all of them."""
    return open_session(file.parent, threads, file.name)


def openvino_default(file: Path, threads: int) -> Runner:
    """Opens the file as OpenVINO's documentation does: for latency, with no precision asked for."""
    import openvino

    properties = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(file), "CPU", properties)
    request = compiled.create_infer_request()
    names = [o.get_any_name() for o in compiled.outputs]

    def run(inputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        request.infer(dict(inputs), share_inputs=True)
        return {name: request.get_tensor(name).data.copy() for name in names}

    return run


def _torch_runner(call: Callable[[dict[str, torch.Tensor]], torch.Tensor], output: str) -> Runner:
    def run(inputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        # Copied: arrays of a case cannot be written to, which torch warns of.
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
        with torch.inference_mode():
            return {output: call(tensors).numpy()}

    return run
