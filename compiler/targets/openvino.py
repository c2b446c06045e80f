"""OpenVINO: an IR for Triton's `openvino` backend, and the same file compiled for the CPU as that backend does.

The one target with a precision that is not written into the graph: bf16. The CPU plugin takes it from a property and
decides node by node; what it did is read back from the graph that it executes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.dtypes import DTYPES, AnyArray, DType
from compiler.errors import EnvironmentLacks, ModelRefused
from compiler.precision.support import computes_bf16
from compiler.targets.onnxruntime import MODEL_FILE as ONNX_FILE
from compiler.targets.onnxruntime import write_onnx
from compiler.targets.registry import ArtifactTensor, Runner, Target

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.spec import ModelSpec, Serving

MODEL_FILE = "model.xml"
_KINDS = {"f": "float", "i": "int", "u": "uint"}
# The manifest's key for what INFERENCE_PRECISION_HINT the version was proved with, and is served with.
HINT = "inference_precision"
# What the executed graph must hold for a precision that was asked for.
_EXECUTED = {"bf16": ("bf16",), "int8": ("i8", "u8")}


def write(model: ir.Model, folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Converts the graph and writes `model.xml` and `model.bin`, weights in the graph's own precision.

    Returns:
        The manifest's facts: the property that the file is compiled with, and the nodes that this machine executes by
        precision.

    Raises:
        ModelRefused: OpenVINO cannot convert the graph, or executes no node in the precision that was asked for.
    """
    ov = _openvino()
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        write_onnx(model, Path(work))
        try:
            converted = ov.convert_model(str(Path(work, ONNX_FILE)))
        except Exception as error:
            raise ModelRefused(f"OpenVINO {ov.__version__} cannot convert the graph: {_first_line(error)}") from error
    # compress_to_fp16 is the default, and would change every weight.
    ov.save_model(converted, str(folder / MODEL_FILE), compress_to_fp16=False)
    facts: dict[str, Any] = {"openvino": ov.__version__, HINT: inference_precision(spec.precision)}
    executed = executed_precisions(_compile(folder, spec.serving.threads, facts))
    refuse_lost_precision(spec.precision, executed)
    notes = [f"nodes executed by precision: {', '.join(f'{name} {count}' for name, count in executed.items())}"]
    return {**facts, "nodes_by_precision": executed, "notes": notes}


def inference_precision(precision: str) -> str:
    """Returns the hint to compile with: fp32 stays exact; what int8 leaves is bf16 where this CPU computes in it."""
    if precision == "bf16" or (precision == "int8" and computes_bf16()):
        return "bf16"
    return "f32"


def executed_precisions(compiled: Any) -> dict[str, int]:
    """Returns how many nodes of the graph that the plugin executes compute in which type, the most first."""
    found: Counter[str] = Counter()
    for operation in compiled.get_runtime_model().get_ops():
        info = operation.get_rt_info()
        if str(info["layerType"].astype(str)) not in ("Const", "Input", "Output"):
            found[str(info["runtimePrecision"].astype(str))] += 1
    return dict(found.most_common())


def refuse_lost_precision(asked: str, executed: Mapping[str, int]) -> None:
    """Raises ModelRefused where a precision was asked for and the plugin computes no node in it."""
    wanted = _EXECUTED.get(asked)
    if wanted and not any(executed.get(name) for name in wanted):
        raise ModelRefused(
            f"precision {asked} was asked for, and OpenVINO executes no node in it; nodes by precision: "
            f"{', '.join(f'{name} {count}' for name, count in executed.items())}",
            hint="take precision: fp32, or `compile explain` to see whether the graph has a product to convert",
        )


def open_model(folder: Path, threads: int, facts: Mapping[str, Any]) -> Runner:
    """Compiles the written IR for the CPU with the properties that `backends/openvino` gets from config.pbtxt."""
    compiled = _compile(folder, threads, facts)
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


def properties(threads: int, facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the CPU plugin's properties: the precision that was proved, one stream per instance.

    A version without the fact is from before there was a choice: exact fp32.
    """
    limit = {"INFERENCE_NUM_THREADS": str(threads)} if threads else {}
    return {"INFERENCE_PRECISION_HINT": str(facts.get(HINT, "f32")), "NUM_STREAMS": "1", **limit}


def parameters(serving: Serving, facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns config.pbtxt's parameters."""
    return properties(serving.threads, facts)


def interface(folder: Path) -> tuple[tuple[ArtifactTensor, ...], tuple[ArtifactTensor, ...]]:
    """Reads the inputs and outputs of the written IR."""
    model = _openvino().Core().read_model(str(folder / MODEL_FILE))

    def tensor(port: Any) -> ArtifactTensor:
        shape = tuple(d.get_length() if d.is_static else "?" for d in port.get_partial_shape())
        dtype = _dtype(port.get_element_type().get_type_name())
        # 0 is ONNX's "undefined", which no target of ours takes for a type.
        return ArtifactTensor(port.get_any_name(), dtype.onnx if dtype else 0, shape)

    return tuple(map(tensor, model.inputs)), tuple(map(tensor, model.outputs))


def _compile(folder: Path, threads: int, facts: Mapping[str, Any]) -> Any:
    return _openvino().Core().compile_model(str(folder / MODEL_FILE), "CPU", properties(threads, facts))


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
    computed=("bf16",),
    limits="OpenVINO's CPU plugin computes 64-bit integers in 32 bits",
)
