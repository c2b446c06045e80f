"""An ONNX file as the source: run as given in ONNX Runtime as the oracle, and taken over as the graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.cases import Case
from compiler.dtypes import AnyArray, dtype_from_onnx
from compiler.errors import ModelRefused, did_you_mean, one_of
from compiler.export import Exported
from compiler.files import resolve_file
from compiler.reference import check_finite, narrow
from compiler.source_spec import OnnxSource
from compiler.sources.base import OpenedSource
from compiler.sources.onnx_external import ExternalTensor, external_tensors, load_external
from compiler.sources.onnx_graph import graph_for_spec
from compiler.spec import ModelSpec
from compiler.targets.onnxruntime import first_line, import_onnxruntime

if TYPE_CHECKING:
    import onnx

# A protobuf message cannot be larger.
MAX_FILE_BYTES = (1 << 31) - 1
# Older graphs lack what the passes are written for (Squeeze's axes as an input, for one).
OLDEST_OPSET = 13
# Domains that ONNX Runtime has operators for without a library of the user's.
KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")


def onnx_files(spec: ModelSpec, source: OnnxSource) -> dict[str, Path]:
    """Returns the ONNX file and the files of its external data, which are checked on the way."""
    path = _path(spec, source)
    folder = Path(source.onnx).parent
    inner = {item.path for item in read_model(path, source.onnx)[1]}
    return {source.onnx: path, **{str(folder / p.relative_to(path.parent)): p for p in inner}}


def open_onnx(spec: ModelSpec, source: OnnxSource) -> OpenedSource:
    """Checks the file, then opens it; the spec's inputs and outputs are matched by name.

    Raises:
        SpecError: an input or output that the file does not have, or a required one that the spec lacks.
        ModelRefused: the file is damaged, reaches outside its folder, or needs what ONNX Runtime does not have.
    """
    path = _path(spec, source)
    model, external = read_model(path, source.onnx)
    opset = _opset(model, source.onnx)
    _check_domains(model, source.onnx)
    _check(path, source.onnx)
    _check_names(model, spec)
    load_external(external)
    converted, notes = _with_opset(model, opset, spec, source.onnx)
    graph, more = graph_for_spec(converted, spec)
    parameters = sum(_count(t.dims) for t in model.graph.initializer)
    producer = " ".join(p for p in (model.producer_name, model.producer_version) if p) or "an unknown producer"
    exported = Exported(graph, f"none: the file of {producer}", graph.opset_imports[""], (*notes, *more))
    return OpenedSource(
        reference=_reference(path, spec, source.onnx),
        export=lambda case: exported,
        num_parameters=parameters,
        description=f"{source.onnx}: {parameters:,} parameters, opset {opset}, from {producer}",
    )


def read_model(path: Path, shown: str) -> tuple[onnx.ModelProto, list[ExternalTensor]]:
    """Parses the file without its external data, and checks where that data lies.

    Raises:
        ModelRefused: not an ONNX file, or external data that reaches outside the folder or does not fit.
    """
    import onnx
    from google.protobuf.message import DecodeError

    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelRefused(
            f"{shown} has {size} bytes; a protobuf file has at most {MAX_FILE_BYTES}",
            hint="save it with external data",
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ModelRefused(f"{shown} is not a valid ONNX file: {error}") from error
    _check_text(model, shown)
    if not model.graph.node and not model.graph.output:
        raise ModelRefused(f"{shown} is not a valid ONNX file: it has no graph")
    return model, external_tensors(model, path.parent)


def _check_text(model: onnx.ModelProto, shown: str) -> None:
    """Refuses names that are not UTF-8: protobuf hands them out as bytes, over which libraries stumble later."""
    pending: list[Any] = [model]
    while pending:
        for descriptor, value in pending.pop().ListFields():
            if descriptor.type == descriptor.TYPE_MESSAGE:
                pending += [value] if hasattr(value, "DESCRIPTOR") else list(value)
            elif descriptor.type == descriptor.TYPE_STRING:
                for text in [value] if isinstance(value, (str, bytes)) else value:
                    if not isinstance(text, str):
                        raise ModelRefused(
                            f"{shown} is not a valid ONNX file: {descriptor.full_name} is no UTF-8 text: {text[:40]!r}"
                        )


def _path(spec: ModelSpec, source: OnnxSource) -> Path:
    return resolve_file(spec.at("source", "onnx"), source.onnx, spec.path.parent)


def _opset(model: onnx.ModelProto, shown: str) -> int:
    import onnx

    opsets = {i.domain or "ai.onnx": i.version for i in model.opset_import}
    opset = opsets.get("ai.onnx")
    if opset is None:
        raise ModelRefused(f"{shown} does not say which opset of ONNX it uses; it has: {one_of(opsets)}")
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise ModelRefused(
            f"{shown} has opset {opset}; allowed: 1 to {newest}, the newest that onnx {onnx.__version__} knows",
            hint="export it again with an opset of 20",
        )
    return int(opset)


def _check_domains(model: onnx.ModelProto, shown: str) -> None:
    """Refuses operators that only a library of the user's could run."""
    own = {f.domain for f in model.functions}
    unknown: dict[str, set[str]] = {}
    pending = [model.graph, *model.functions]
    while pending:
        for node in pending.pop().node:
            if node.domain not in KNOWN_DOMAINS and node.domain not in own:
                unknown.setdefault(node.domain, set()).add(node.op_type)
            for attribute in node.attribute:
                pending += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    if unknown:
        found = "; ".join(f"'{d}' ({one_of(names)})" for d, names in sorted(unknown.items()))
        raise ModelRefused(
            f"{shown} uses operators of domains that ONNX Runtime does not have: {found}",
            hint="export it without custom operators, or with each as an ONNX function inside the file",
        )


def _check(path: Path, shown: str) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ModelRefused(f"{shown} is not a valid ONNX model: {first_line(error)}") from error


def _check_names(model: onnx.ModelProto, spec: ModelSpec) -> None:
    """Binds the spec's inputs and outputs to the file's by name, and compares the inputs' types."""
    constant = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    file_inputs = {v.name: v for v in model.graph.input}
    required = [name for name in file_inputs if name not in constant]
    nodes = spec.at("inputs")
    for index, tensor in enumerate(spec.inputs):
        if tensor.name not in required:
            nodes.value[index].fail(
                f"the file has no input '{tensor.name}'{did_you_mean(tensor.name, required)}; "
                f"its inputs: {one_of(required)}"
            )
        value = file_inputs[tensor.name]
        if not value.type.HasField("tensor_type"):
            nodes.value[index].fail(
                f"input '{tensor.name}' of the file is not a tensor, which is all that Triton sends"
            )
        seen = dtype_from_onnx(value.type.tensor_type.elem_type)
        if seen is not tensor.dtype:
            name = seen.name if seen else f"of the ONNX element type {value.type.tensor_type.elem_type}"
            nodes.value[index].fail(f"input '{tensor.name}' is {name} in the file, the spec says {tensor.dtype.name}")
    given = [t.name for t in spec.inputs]
    for name in required:
        if name not in given:
            nodes.fail(f"the file needs the input '{name}', which the spec lacks; it has: {one_of(given)}")
    outputs = [v.name for v in model.graph.output]
    for index, output in enumerate(spec.outputs):
        if output.name not in outputs:
            spec.at("outputs").value[index].fail(
                f"the file has no output '{output.name}'{did_you_mean(output.name, outputs)}; "
                f"its outputs: {one_of(outputs)}"
            )


def _with_opset(
    model: onnx.ModelProto, opset: int, spec: ModelSpec, shown: str
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Returns the model in the opset that the spec asks for, or in a newer one where its own is too old."""
    import onnx

    asked = "opset" in spec.root.value
    if opset == spec.opset or (not asked and opset >= OLDEST_OPSET):
        return model, ()
    try:
        converted = onnx.version_converter.convert_version(model, spec.opset)
    except Exception as error:
        why = "the spec asks for" if asked else f"a graph older than opset {OLDEST_OPSET} is converted to"
        raise ModelRefused(
            f"{shown} has opset {opset}, {why} opset {spec.opset}, and onnx's converter fails: {first_line(error)}",
            hint=f"export it again with opset {spec.opset}",
        ) from error
    got = next(i.version for i in converted.opset_import if i.domain in ("", "ai.onnx"))
    if got != spec.opset:
        raise ModelRefused(f"asked for opset {spec.opset}, onnx's converter gave {got} for {shown}")
    return converted, (f"note: converted from opset {opset} to {got} with onnx's version converter",)


def _reference(path: Path, spec: ModelSpec, shown: str) -> Any:
    """Opens the file as given, with graph optimisation off: what it computes, not what a rewrite makes of it."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelRefused(
            f"ONNX Runtime {ort.__version__} cannot load {shown} as given: {first_line(error)}"
        ) from error
    names = [o.name for o in spec.outputs]

    def run(case: Case) -> dict[str, AnyArray]:
        inputs: Mapping[str, AnyArray] = case.inputs
        try:
            values = session.run(names, dict(inputs))
        except Exception as error:
            raise ModelRefused(
                f"{shown} itself fails at {case.name}: {first_line(error)}", hint=narrow(spec)
            ) from error
        outputs = dict(zip(names, values, strict=True))
        check_finite(outputs, case, shown)
        return outputs

    return run


def _count(dims: Any) -> int:
    total = 1
    for dim in dims:
        total *= int(dim)
    return total
