"""OpenVINO: an IR for Triton's `openvino` backend, and the same file compiled for the CPU as that backend does."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.dtypes import DTYPES, AnyArray, DType
from compiler.errors import EnvironmentLacks, ModelRefused
from compiler.targets.onnxruntime import MODEL_FILE as ONNX_FILE
from compiler.targets.onnxruntime import write_onnx
from compiler.targets.registry import ArtifactTensor, Runner, Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.spec import ModelSpec, Serving

MODEL_FILE = "model.xml"
_KINDS = {"f": "float", "i": "int", "u": "uint"}


def write(model: ir.Model, folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Converts the graph and writes `model.xml` and `model.bin`, weights in the graph's own precision."""
    ov = _openvino()
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        write_onnx(model, Path(work))
        try:
            converted = ov.convert_model(str(Path(work, ONNX_FILE)))
        except Exception as error:
            raise ModelRefused(f"OpenVINO {ov.__version__} cannot convert the graph: {_first_line(error)}") from error
    # compress_to_fp16 is the default, and would change every weight.
    ov.save_model(converted, str(folder / MODEL_FILE), compress_to_fp16=False)
    return {"openvino": ov.__version__}


def open_model(folder: Path, threads: int) -> Runner:
    """Compiles the written IR for the CPU with the properties that `backends/openvino` gets from config.pbtxt."""
    ov = _openvino()
    compiled = ov.Core().compile_model(str(folder / MODEL_FILE), "CPU", properties(threads))
    request = compiled.create_infer_request()
    wanted = [i.get_any_name() for i in compiled.inputs]
    names = [o.get_any_name() for o in compiled.outputs]

    def run(inputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        try:
            request.infer({name: inputs[name] for name in wanted})
        except Exception as error:
            shapes = ", ".join(f"{n} {list(inputs[n].shape)}" for n in wanted)
            raise ModelRefused(f"the compiled file fails at {shapes}: {_first_line(error)}") from error
        return {name: request.get_tensor(name).data.copy() for name in names}

    return run


def properties(threads: int) -> dict[str, str]:
    """Returns the CPU plugin's properties: exact fp32, one stream per instance."""
    limit = {"INFERENCE_NUM_THREADS": str(threads)} if threads else {}
    return {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1", **limit}


def parameters(serving: Serving) -> dict[str, str]:
    """Returns config.pbtxt's parameters."""
    return properties(serving.threads)


def interface(folder: Path) -> tuple[tuple[ArtifactTensor, ...], tuple[ArtifactTensor, ...]]:
    """Reads the inputs and outputs of the written IR."""
    model = _openvino().Core().read_model(str(folder / MODEL_FILE))

    def tensor(port: Any) -> ArtifactTensor:
        shape = tuple(d.get_length() if d.is_static else "?" for d in port.get_partial_shape())
        dtype = _dtype(port.get_element_type().get_type_name())
        # 0 is ONNX's "undefined", which no target of ours takes for a type.
        return ArtifactTensor(port.get_any_name(), dtype.onnx if dtype else 0, shape)

    return tuple(map(tensor, model.inputs)), tuple(map(tensor, model.outputs))


def _dtype(name: str) -> DType | None:
    """Returns the dtype that OpenVINO calls f32, i64, u8 or boolean."""
    return DTYPES.get("bool" if name == "boolean" else _KINDS.get(name[:1], "") + name[1:])


def _openvino() -> Any:
    try:
        import openvino
    except ModuleNotFoundError as error:
        raise EnvironmentLacks(
            "the target 'openvino' needs OpenVINO, which is not installed", hint="pip install 'modelkiln[openvino]'"
        ) from error
    return openvino


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


TARGET = Target(
    name="openvino",
    backend="openvino",
    model_file=MODEL_FILE,
    packages=("torch", "onnx", "onnx-ir", "onnxscript", "openvino"),
    write=write,
    open=open_model,
    interface=interface,
    parameters=parameters,
    limits="OpenVINO's CPU plugin computes 64-bit integers in 32 bits",
)
