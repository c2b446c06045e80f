"""Runs an engine on this machine's GPU, buffers held by torch; nothing here works, or is tried, without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler.dtypes import AnyArray
from compiler.engine_host import host_gpus
from compiler.errors import ModelRefused
from compiler.targets.registry import Runner
from compiler.targets.tensorrt_library import ENGINE_FILE, Library, errors_of, load_library, make_log


def open_engine(library: Library, folder: Path) -> Runner | None:
    """Opens the engine, or returns None where there is no GPU or torch has no CUDA to hold its buffers.

    Raises:
        ModelRefused: there is a GPU, and the engine does not load on it.
    """
    import torch

    if not host_gpus() or not torch.cuda.is_available():
        return None
    trt = load_library(library)
    log = make_log(trt)
    runtime = trt.Runtime(log)
    # A version-compatible engine carries its own runtime; this one was built a moment ago, by us.
    runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine((folder / ENGINE_FILE).read_bytes())
    if engine is None:
        raise ModelRefused(f"{library.target} {trt.__version__} cannot load the engine it built: {errors_of(log)}")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}

    # The runtime, engine and context must outlive the function that uses them.
    def run(inputs: Mapping[str, AnyArray], alive: tuple[Any, ...] = (runtime, engine, log)) -> dict[str, AnyArray]:
        buffers = {}
        for name in (n for n in names if is_input[n]):
            array = np.ascontiguousarray(inputs[name])
            buffers[name] = torch.from_numpy(array).cuda()
            if not context.set_input_shape(name, array.shape):
                raise ModelRefused(f"the engine refuses {name} {list(array.shape)}: {errors_of(log)}")
        for name in (n for n in names if not is_input[n]):
            shape = tuple(context.get_tensor_shape(name))
            if -1 in shape:
                raise ModelRefused(f"the shape of output '{name}' depends on values: {list(shape)}")
            dtype = torch.from_numpy(np.empty(0, trt.nptype(engine.get_tensor_dtype(name)))).dtype
            buffers[name] = torch.empty(shape, dtype=dtype, device="cuda")
        for name, buffer in buffers.items():
            context.set_tensor_address(name, buffer.data_ptr())
        stream = torch.cuda.Stream()
        # The copies above ran on the default stream.
        stream.wait_stream(torch.cuda.default_stream())
        if not context.execute_async_v3(stream.cuda_stream):
            raise ModelRefused(f"the engine fails: {errors_of(log)}")
        stream.synchronize()
        return {name: buffers[name].cpu().numpy() for name in names if not is_input[name]}

    return run
