"""A Hugging Face folder: built from its config by transformers, weights loaded strictly, no remote code."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compiler.cases import Case
from compiler.errors import EnvironmentLacks, ModelkilnError, ModelRefused, did_you_mean, where_it_failed
from compiler.export import Exported, export_onnx
from compiler.source_spec import HuggingFaceSource
from compiler.sources.base import OpenedSource, opened_module
from compiler.sources.huggingface_folder import ModelFolder, read_folder, tensor_places
from compiler.sources.weights import read_safetensors, read_tensor_pickle, some
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import torch

# In the order in which they are tried: the fused one first.
ATTENTIONS = ("sdpa", "eager")
# Tied and ignored weights are not in the files; what goes beyond that is no model of these files.
MAX_WEIGHTS_PER_HELD = 4
SMALL_MODEL = 1 << 24
# What a config must not decide: where code and kernels come from, and the type that the oracle computes in.
_DROPPED = ("attn_implementation", "experts_implementation", "torch_dtype", "dtype", "transformers_version")


def open_huggingface(spec: ModelSpec, source: HuggingFaceSource, trust_pickle: bool) -> OpenedSource:
    """Builds the model in fp32 and eval mode; outputs are matched by key.

    Raises:
        SpecError: no such folder or class.
        ModelRefused: the folder brings code, is damaged, or its weights do not fit the class.
        EnvironmentLacks: transformers is not installed.
    """
    folder = read_folder(spec, source)
    if folder.is_pickle and not trust_pickle:
        raise ModelRefused(
            f"{source.huggingface} has pickled weights only ({folder.weights[0]})",
            hint="convert them to safetensors; or, if you trust who made them: compile build --trust-pickle "
            "(they are still opened with weights_only)",
        )
    state = _read_state(folder, source.huggingface)
    with _quiet_transformers() as transformers:
        model, notes = _build(transformers, spec, source, folder, state)
    trusted = tuple(f"{source.huggingface}/{name}" for name in folder.weights) if folder.is_pickle else ()
    if trusted:
        notes += (f"warning: {', '.join(trusted)} opened as pickles, with weights_only on (--trust-pickle)",)
    description = f"{type(model).__name__} of {source.huggingface}"
    opened = opened_module(model, spec, description, notes=notes, trusted=trusted)
    return dataclasses.replace(opened, export=lambda case: _export(model, spec, case))


def _read_state(folder: ModelFolder, shown: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of all weight files by name: what the files hold counts, not what the index lists."""
    read = read_tensor_pickle if folder.is_pickle else read_safetensors
    files = {name: read(folder.path / name, f"{shown}/{name}") for name in folder.weights}
    return {tensor: files[name][tensor] for tensor, name in tensor_places(folder, files, shown).items()}


def _build(
    transformers: Any, spec: ModelSpec, source: HuggingFaceSource, folder: ModelFolder, state: dict[str, torch.Tensor]
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    import torch

    config = _config(transformers, folder, source)
    ignored = {k for k in state if _matches(k, source)}
    state = {k: v for k, v in state.items() if k not in ignored}
    _check_layers(folder.config, len(state), source)
    for attention in ATTENTIONS:
        try:
            model_class = _model_class(transformers, spec, source, config, attention)
            _check_size(model_class, config, state, source)
            # No path is given: the state and the config are all that it may read.
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                attn_implementation=attention,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
            break
        except ModelkilnError:
            raise
        except Exception as error:
            # ValueError is how a model says that it does not have this attention.
            if attention == ATTENTIONS[-1] or not isinstance(error, ValueError):
                raise ModelRefused(
                    f"{source.huggingface}: transformers {transformers.__version__} cannot build "
                    f"{source.model_class} from it: {where_it_failed(error)}"
                ) from error
    missing = sorted(report["missing_keys"])
    absent = [k for k in missing if _matches(k, source)]
    for pattern in source.ignore_weights:
        if not fnmatch.filter([*ignored, *absent], pattern):
            spec.at("source", "ignore_weights").fail(f"source.ignore_weights: no weight matches '{pattern}'")
    _check_fit(source, sorted(set(missing) - set(absent)), sorted(report["unexpected_keys"]))
    _poison(model, absent)
    types = sorted({str(v.dtype).removeprefix("torch.") for v in state.values() if v.is_floating_point()} - {"float32"})
    notes = (f"note: weights in {', '.join(types)} are computed with in float32",) if types else ()
    return model.eval(), notes


def _config(transformers: Any, folder: ModelFolder, source: HuggingFaceSource) -> Any:
    kind = folder.config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ModelRefused(
            f"{source.huggingface}/config.json: transformers {transformers.__version__} knows no model_type {kind!r}"
            f"{did_you_mean(str(kind), transformers.CONFIG_MAPPING)}"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(_plain(folder.config))
    except Exception as error:
        raise ModelRefused(
            f"{source.huggingface}/config.json does not fit '{kind}': {where_it_failed(error)}"
        ) from error
    config.return_dict = True  # outputs are matched by key
    config.use_cache = False  # a cache is not a tensor that could be served
    return config


def _plain(value: Any) -> Any:
    """Returns the config without the keys that choose code, kernels or element types, at any depth."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if not k.startswith("_") and k not in _DROPPED}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _model_class(transformers: Any, spec: ModelSpec, source: HuggingFaceSource, config: Any, attention: str) -> Any:
    """Returns the concrete class: an AutoModel stands for the one that the config's type has."""
    import torch

    node = spec.at("source", "model_class")
    found = getattr(transformers, source.model_class, None)
    autos = [n for n in dir(transformers) if n.startswith("AutoModel")]
    if found is not None and source.model_class in autos:
        with torch.device("meta"):  # only its class is wanted, not its weights
            return type(found.from_config(config, attn_implementation=attention, trust_remote_code=False))
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        node.fail(
            f"transformers {transformers.__version__} has no model class '{source.model_class}'"
            f"{did_you_mean(source.model_class, autos)}",
            hint="allowed: AutoModel, AutoModelForSequenceClassification and so on, or a class such as BertModel",
        )
    return found


def _check_layers(config: Any, num_tensors: int, source: HuggingFaceSource) -> None:
    """Refuses a config with more layers than there are tensors: building them would never end.

    Raises:
        ModelRefused: with the key and both numbers.
    """
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            for key, count in value.items():
                counts_parts = key.endswith("layers") or key in ("n_layer", "num_experts", "num_local_experts")
                if counts_parts and isinstance(count, int) and count > max(num_tensors, 1):
                    raise ModelRefused(
                        f"{source.huggingface}/config.json has {key} {count}, and the files hold {num_tensors} tensors"
                    )


def _check_size(model_class: Any, config: Any, state: dict[str, torch.Tensor], source: HuggingFaceSource) -> None:
    """Refuses a config that asks for far more weights than the files hold, before any of them takes memory.

    Raises:
        ModelRefused: with both numbers.
    """
    import torch

    with torch.device("meta"):
        asked = sum(p.numel() for p in model_class(config).parameters())
    held = sum(t.numel() for t in state.values())
    if asked > MAX_WEIGHTS_PER_HELD * held + SMALL_MODEL:
        raise ModelRefused(
            f"{source.huggingface}/config.json asks for {asked} weights, and the files hold {held}",
            hint="the config belongs to another model, or shards are missing",
        )


def _check_fit(source: HuggingFaceSource, missing: list[str], extra: list[str]) -> None:
    problems = [
        *([f"missing from the files: {some(missing)}"] if missing else []),
        *([f"not in the model: {some(extra)}"] if extra else []),
    ]
    if problems:
        raise ModelRefused(
            f"the weights of {source.huggingface} do not fit {source.model_class}: {'; '.join(problems)}",
            hint="choose the class that the folder was saved from, or name weights that no output of the spec "
            "needs in source.ignore_weights (a glob)",
        )


def _poison(model: torch.nn.Module, names: list[str]) -> None:
    """Fills absent weights with NaN: an output that depends on one is refused, where a random number would pass."""
    import torch

    own = model.state_dict()
    with torch.no_grad():
        for name in names:
            if own[name].is_floating_point():
                own[name].fill_(float("nan"))


def _export(model: torch.nn.Module, spec: ModelSpec, case: Case) -> Exported:
    """Exports with the attention that the oracle ran with, or with the plain one where that has no ONNX form."""
    try:
        return export_onnx(model, spec, case)
    except ModelRefused as refusal:
        used = model.config._attn_implementation
        if used == "eager":
            raise
        try:
            model.set_attn_implementation("eager")
            exported = export_onnx(model, spec, case)
        except Exception:
            raise refusal from None
        note = f"note: exported with eager attention, since with {used}: {refusal.message}"
        return dataclasses.replace(exported, notes=(*exported.notes, note))


def _matches(name: str, source: HuggingFaceSource) -> bool:
    return any(fnmatch.fnmatchcase(name, p) for p in source.ignore_weights)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """Imports transformers with the hub switched off, and keeps its chatter off the user's terminal."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported: no config can make it download anything
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise EnvironmentLacks(
            f"source.huggingface needs transformers, which is not installed (no module '{error.name}')",
            hint="pip install 'modelkiln[hf]'",
        ) from error
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield transformers
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
