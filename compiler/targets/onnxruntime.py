"""ONNX Runtime: an ONNX file for Triton's `onnxruntime` backend, and a session on it as that backend opens it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.dtypes import AnyArray
from compiler.errors import EnvironmentLacks, ModelRefused
from compiler.targets.registry import ArtifactTensor, Runner, Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.spec import ModelSpec, Serving

MODEL_FILE = "model.onnx"
# A protobuf message ends at 2 GiB; the graph itself needs room too.
EXTERNAL_DATA_THRESHOLD_BYTES = 3 << 29
# The newest IR version that the ONNX Runtime of Triton's current images reads.
IR_VERSION = 10


def write(model: ir.Model, folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Writes the model; nothing in the spec changes what is written."""
    write_onnx(model, folder)
    return {"ir_version": IR_VERSION}


def write_onnx(
    model: ir.Model, folder: Path, threshold_bytes: int = EXTERNAL_DATA_THRESHOLD_BYTES, name: str = MODEL_FILE
) -> None:
    """Writes the model, with the weights in one file beside it where a protobuf cannot hold them."""
    import onnx_ir

    model.ir_version = IR_VERSION
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    data_file = f"{name}.data"
    for file in (name, data_file):
        (folder / file).unlink(missing_ok=True)  # a data file that is there already would be appended to
    external = data_file if size > threshold_bytes else None
    onnx_ir.save(model, folder / name, external_data=external)


def open_session(folder: Path, threads: int, name: str = MODEL_FILE) -> Runner:
    """Opens the written file on the CPU, with the options of `backends/onnxruntime`."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what fails is raised; printed too, it would stand there twice
    try:
        session = ort.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelRefused(f"ONNX Runtime {ort.__version__} cannot load the file: {first_line(error)}") from error
    wanted = [i.name for i in session.get_inputs()]
    names = [o.name for o in session.get_outputs()]

    def run(inputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        try:
            values = session.run(names, {name: inputs[name] for name in wanted})
        except Exception as error:
            shapes = ", ".join(f"{n} {list(inputs[n].shape)}" for n in wanted)
            raise ModelRefused(f"the compiled file fails at {shapes}: {first_line(error)}") from error
        return dict(zip(names, values, strict=True))

    return run


def interface(folder: Path, name: str = MODEL_FILE) -> tuple[tuple[ArtifactTensor, ...], tuple[ArtifactTensor, ...]]:
    """Reads the inputs and outputs of the written file, types included, without its weights."""
    import onnx

    graph = onnx.load(str(folder / name), load_external_data=False).graph

    def tensor(value: Any) -> ArtifactTensor:
        dims = value.type.tensor_type.shape.dim
        shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or "?") for d in dims)
        return ArtifactTensor(value.name, value.type.tensor_type.elem_type, shape)

    return tuple(map(tensor, graph.input)), tuple(map(tensor, graph.output))


def parameters(serving: Serving, facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns config.pbtxt's parameters, which the C++ backend takes alike."""
    return {"intra_op_thread_count": str(serving.threads)} if serving.threads else {}


def import_onnxruntime() -> Any:
    """Imports ONNX Runtime; raises EnvironmentLacks with the install command where it is absent."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EnvironmentLacks(
            "the target 'onnxruntime' needs ONNX Runtime, which is not installed",
            hint="pip install 'modelkiln[cpu]' (or 'modelkiln[gpu]' on an NVIDIA machine)",
        ) from error
    return onnxruntime


def first_line(error: BaseException) -> str:
    """Returns an error's text on one line, cut at 400 characters."""
    return " ".join(str(error).split())[:400]


TARGET = Target(
    name="onnxruntime",
    backend="onnxruntime",
    model_file=MODEL_FILE,
    packages=("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
    write=write,
    open=lambda folder, threads, facts: open_session(folder, threads),
    interface=interface,
    parameters=parameters,
)
