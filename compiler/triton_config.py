"""Triton's model configuration: protobuf messages, printed to config.pbtxt and parsed back. No templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.dtypes import dtype_from_onnx
from compiler.errors import EnvironmentLacks, ModelRefused, RepositoryError
from compiler.spec import ModelSpec, Serving
from compiler.targets.registry import ArtifactTensor, Target

CONFIG_FILE = "config.pbtxt"
# Fields that the bundled server 2.51 does not know: one of them fails the whole load.
UNKNOWN_TO_SERVER = ("model_metrics",)


@dataclass(frozen=True)
class TensorConfig:
    """A tensor as Triton sees it.

    Attributes:
        triton_type: `TYPE_FP32` and so on.
        dims: the sizes without the batch axis; -1 is variable.
    """

    name: str
    triton_type: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One step of an ensemble; the maps go from the step's tensor to the ensemble's tensor."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def tensor_config(tensor: ArtifactTensor, batched: bool) -> TensorConfig:
    """Converts a tensor of the shipped file; its dtype is the file's, not the framework's.

    Raises:
        ModelRefused: Triton has no such dtype, or the first axis cannot be the batch.
    """
    dtype = dtype_from_onnx(tensor.onnx_type)
    if dtype is None:
        raise ModelRefused(f"'{tensor.name}' has the ONNX element type {tensor.onnx_type}, which Triton cannot serve")
    shape = tensor.shape
    if batched:
        if not shape or isinstance(shape[0], int):
            raise ModelRefused(
                f"'{tensor.name}' starts with {list(shape[:1])} in the compiled file: Triton can only merge requests "
                "along a variable first axis",
                hint="drop the 'batch' dim from the spec to serve the model without batching",
            )
        shape = shape[1:]
    return TensorConfig(tensor.name, dtype.triton, tuple(d if isinstance(d, int) else -1 for d in shape))


def model_config(
    spec: ModelSpec,
    target: Target,
    inputs: Sequence[ArtifactTensor],
    outputs: Sequence[ArtifactTensor],
    facts: Mapping[str, Any],
) -> Any:
    """Returns the ModelConfig message of a compiled model; `facts` is what its target's `write` returned."""
    batched = spec.max_batch_size > 0
    config = base_config(
        spec.name,
        target.backend,
        spec.max_batch_size,
        [tensor_config(t, batched) for t in inputs],
        [tensor_config(t, batched) for t in outputs],
    )
    add_serving(config, spec.serving, target.parameters(spec.serving, facts), target.instance_kind)
    return config


def base_config(
    name: str,
    backend: str,
    max_batch_size: int,
    inputs: Iterable[TensorConfig],
    outputs: Iterable[TensorConfig],
) -> Any:
    """Returns a ModelConfig with name, backend, batch size and tensors."""
    config = _pb2().ModelConfig(name=name, max_batch_size=max_batch_size)
    if backend == "ensemble":
        config.platform = "ensemble"
    else:
        config.backend = backend
    for message, tensors in ((config.input, inputs), (config.output, outputs)):
        for tensor in tensors:
            message.add(name=tensor.name, data_type=_pb2().DataType.Value(tensor.triton_type), dims=tensor.dims)
    return config


def add_serving(config: Any, serving: Serving, parameters: Mapping[str, str], kind: str = "KIND_CPU") -> None:
    """Adds instances, dynamic batching and parameters.

    Preferred batch sizes are never written: Triton would wait for exactly those.
    """
    config.instance_group.add(kind=_pb2().ModelInstanceGroup.Kind.Value(kind), count=serving.instances)
    if config.max_batch_size > 1:
        config.dynamic_batching.max_queue_delay_microseconds = serving.max_queue_delay_us
        config.dynamic_batching.SetInParent()
    for key, value in sorted(parameters.items()):
        config.parameters[key].string_value = value


def ensemble_config(
    name: str,
    max_batch_size: int,
    inputs: Iterable[TensorConfig],
    outputs: Iterable[TensorConfig],
    steps: Iterable[Step],
) -> Any:
    """Returns the ModelConfig of an ensemble; every step asks for the newest version, -1, by name."""
    config = base_config(name, "ensemble", max_batch_size, inputs, outputs)
    for step in steps:
        message = config.ensemble_scheduling.step.add(model_name=step.model, model_version=-1)
        message.input_map.update(step.inputs)
        message.output_map.update(step.outputs)
    return config


def text_from_config(config: Any) -> str:
    """Prints a message as config.pbtxt and proves that parsing it gives the same message."""
    from google.protobuf import text_format

    for field in UNKNOWN_TO_SERVER:
        if field in config.DESCRIPTOR.fields_by_name and config.HasField(field):
            raise ModelRefused(f"the field '{field}' is not known to the bundled Triton server")
    text: str = text_format.MessageToString(config)
    # proto3 does not print zeros, and a file without the field reads as one that forgot it.
    if config.max_batch_size == 0:
        text += "max_batch_size: 0\n"
    assert config_from_text(text, CONFIG_FILE) == config
    return text


def config_from_text(text: str, shown: str) -> Any:
    """Parses config.pbtxt.

    Raises:
        RepositoryError: with the line and column of the fault.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, _pb2().ModelConfig())
    except text_format.ParseError as error:
        raise RepositoryError(f"{shown}:{error}") from None


def served_versions(config: Any, versions: Sequence[int]) -> list[int]:
    """Returns the versions that a server loads by the config's version policy.

    Args:
        config: the ModelConfig.
        versions: that there are, oldest first; a policy may name others.
    """
    policy = config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "specific":
        return sorted(policy.specific.versions)
    if kind == "all":
        return list(versions)
    return list(versions[-max(policy.latest.num_versions, 1) :])


def _pb2() -> Any:
    try:
        from tritonclient.grpc import model_config_pb2
    except ModuleNotFoundError as error:
        raise EnvironmentLacks("tritonclient is not installed", hint="pip install 'tritonclient[grpc,http]'") from error
    return model_config_pb2
