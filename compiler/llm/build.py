"""compile_llm(): read -> prove -> publish, one visible list."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import backends.llm
from backends.llm.capacity import num_parameters
from backends.llm.engine.draft import DraftModel, open_draft
from backends.llm.engine.load import SETTINGS_FILE, EngineSettings, engine_settings
from backends.llm.loaders import LoadedModel, load_model
from backends.llm.loaders.base import no_model
from backends.llm.models.config import DecoderConfig
from backends.llm.runners.base import ModelRunner
from backends.llm.runners.kept import carry
from backends.llm.tokenizers import Tokenizer, load_tokenizer
from compiler.build_key import up_to_date
from compiler.errors import ModelRefused, UsageError
from compiler.fingerprint import inputs_fingerprint
from compiler.llm.config import BACKEND, llm_config
from compiler.llm.parity import (
    EXACT,
    FAST,
    LogitsReport,
    compare_logits,
    judged_prompts,
    reference_logits,
    runner_logits,
)
from compiler.manifest import BuildResult, manifest_head
from compiler.progress import Stage, silent_stage
from compiler.repository import Repository
from compiler.triton_config import text_from_config
from compiler.triton_install import link_or_copy
from compiler.units import shown_bytes

NUM_STAGES = 5
WAITING_PER_SEQ = 8  # requests that may wait for each one that may run, unless --max-waiting says otherwise
DRAFT_FILE = "draft.gguf"
PACKAGES = ("numba", "openvino", "torch", "tokenizers", "numpy")
EXAMPLE_LENGTHS = (256, 1024, 4096)


def compile_llm(
    source: Path,
    name: str,
    repository: Repository,
    options: Mapping[str, Any],
    *,
    ready_within: str | None = None,
    default_deadline_ms: float | None = None,
    force: bool = False,
    stage: Stage = silent_stage,
) -> BuildResult:
    """Checks, proves and publishes a language model; does nothing where its newest version is already that.

    Args:
        source: a GGUF file or a Hugging Face folder.
        options: of the engine, see `engine_settings`; they travel with the version.
        ready_within: how long its start may take, as in 10s; `compile serve` measures it.
        default_deadline_ms: of requests without one, see ServiceOptions.

    Raises:
        ModelkilnError: the repository is as it was.
    """
    started = time.monotonic()
    repository.check_publishable(name)
    settings = engine_settings(options)
    files = _model_files(source, settings.draft_model)
    if settings.draft_model is not None:
        options = {**options, "draft_model": DRAFT_FILE}  # as it is called in the version's folder
    document: dict[str, Any] = {"name": name, "source": source.name, "engine": dict(options)}
    parameters = {} if default_deadline_ms is None else {"default_deadline_ms": f"{default_deadline_ms:g}"}
    if serving := {**parameters, **({} if ready_within is None else {"ready_within": ready_within})}:
        document["serving"] = serving
    fingerprint = {**inputs_fingerprint(document, files, PACKAGES), "engine": _engine_sha256()}
    if not force and (current := up_to_date(repository, name, fingerprint, source.parent)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)
    with stage("read the model") as log:
        model = load_model(source)
        tokenizer = load_tokenizer(source)
        config = model.config
        limit = min(settings.scheduler.max_model_len, config.max_position_embeddings)
        log.note(
            f"{config.architecture}, {num_parameters(config):,} parameters, {model.quantization}; context of "
            f"{config.max_position_embeddings} tokens, {config.vocab_size} in the vocabulary"
        )
        for line in _surprises(options, limit, tokenizer, config):
            log.note(line)
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        version, graphs = Path(work, "version"), Path(work, "graphs")
        version.mkdir()
        with stage("build") as log:
            # Before the slow reference: a cache that holds no block, say, is told at once.
            if settings.draft_model is not None:
                draft = open_draft(settings, tokenizer, config)
                draft.proposer(limit).close()
                settings = draft.settings
                log.note(_draft_line(draft))
            runner = _keeping_graphs(settings, graphs).open_runner(model)
            capacity = _capacity(runner, limit)
            log.note(f"computed by {runner.name}")
            log.note(_capacity_line(capacity))
        try:
            report = _prove(runner, model, judged_prompts(tokenizer, runner, limit), settings, stage)
        finally:
            runner.close()
        if report.problem:
            raise ModelRefused(
                f"{source.name} computed by {runner.name} is not the model: {report.problem}",
                hint="try --dtype float32"
                if settings.runner == "torch"
                else "try --runner openvino --weights bf16, or --exact",
            )
        with stage("publish") as log:
            stored: dict[str, Any] = {"model": next(iter(files))} if source.is_file() else {}
            # An endless queue would answer nobody in time; whoever wants another limit says so.
            stored["max_waiting"] = WAITING_PER_SEQ * settings.scheduler.max_num_seqs
            _fill(version, files, stored, options)
            if graphs.is_dir():
                carry(graphs, version)
            manifest = {
                **manifest_head(document, fingerprint, {}, source),
                "command": f"compile llm {source.name} --name {name}",
                "backend": BACKEND,
                "parameters": num_parameters(config),
                "llm": {
                    "architecture": config.architecture,
                    "quantization": model.quantization,
                    "runner": runner.name,
                    "max_model_len": limit,
                    "capacity": capacity,
                    "parity": report.to_json(),
                },
            }
            triton_config = text_from_config(llm_config(name, _instance_kind(options), parameters))
            published = repository.publish(name, triton_config, version, manifest)
            log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started)


def _keeping_graphs(settings: EngineSettings, folder: Path) -> EngineSettings:
    """Returns the settings with a folder for what the runner builds; torch's builds nothing to keep."""
    if settings.runner == "torch":
        return settings
    return replace(settings, runner_options=replace(settings.runner_options, cache_dir=folder))


def _prove(
    runner: ModelRunner, model: LoadedModel, prompts: list[list[int]], settings: EngineSettings, stage: Stage
) -> LogitsReport:
    """Compares the runner with the plain decoder."""
    with stage("run the reference") as log:
        references = reference_logits(model, prompts)
        log.note(f"{sum(map(len, prompts))} positions by the plain decoder in float32")
    with stage("prove") as log:
        found = runner_logits(runner, prompts, lambda done: log.step(done, sum(map(len, prompts))))
        report = compare_logits(found, references, EXACT if is_exact(settings) else FAST)
        log.note(_parity_line(report))
    return report


def _fill(version: Path, files: Mapping[str, Path], stored: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Puts the model's files and the engine's options into a folder."""
    for file_name, path in files.items():
        link_or_copy(str(path.resolve()), str(version / file_name))
    (version / SETTINGS_FILE).write_text(json.dumps({**stored, **options}, indent=1) + "\n", encoding="utf-8")


def is_exact(settings: EngineSettings) -> bool:
    """Returns whether the runner computes in float32 throughout."""
    options = settings.runner_options
    return bool(options.dtype == "float32" if settings.runner == "torch" else options.exact)


def _instance_kind(options: Mapping[str, Any]) -> str:
    """Returns who places the model: where it may be on a GPU it is the engine itself, by its option `device`."""
    return "KIND_CPU" if options.get("device", "cpu") == "cpu" else "KIND_MODEL"


def _model_files(source: Path, draft: Path | None) -> dict[str, Path]:
    """Returns what is published of a model, by the name that it gets; the name of a GGUF file does not matter."""
    if draft is not None and (draft.is_dir() or draft.suffix != ".gguf"):
        raise UsageError(f"--draft-model is {draft}; allowed: a GGUF file")
    if not source.exists():
        raise no_model(source, "a .gguf file, a Hugging Face folder")
    drafts = {} if draft is None else {DRAFT_FILE: draft}
    if source.is_dir():
        kinds = ("*.json", "*.safetensors", "*.jinja", "*.model")
        own = {path.name: path for kind in kinds for path in sorted(source.glob(kind)) if path.is_file()}
        from backends.llm.tokenizers.folder_tokenizer import TEMPLATE, flat_template_name, template_files

        named = template_files(source).items()
        templates = {TEMPLATE if name == "default" else flat_template_name(name): file for name, file in named}
        return {**own, **templates, **drafts}
    return {"model.gguf": source, **drafts}


def _surprises(options: Mapping[str, Any], limit: int, tokenizer: Tokenizer, config: DecoderConfig) -> list[str]:
    """Returns what is taken and may not be what its user thinks it is."""
    found = []
    if options.get("max_model_len", 0) > limit:
        found.append(f"max_model_len {options['max_model_len']} is cut to {limit}, for which the model was made")
    if not any(token_id < config.vocab_size for token_id in tokenizer.eos_token_ids):
        found.append("no token ends an answer: none is named that the model has; all go on to max_tokens")
    return found


def _draft_line(draft: DraftModel) -> str:
    parameters = num_parameters(draft.model.config)
    return f"draft model: {parameters:,} parameters, {shown_bytes(draft.kv_cache_bytes)} of the KV cache's memory"


def _capacity(runner: ModelRunner, max_model_len: int) -> dict[str, Any]:
    """Returns what fits into the runner's cache."""
    lengths = [length for length in EXAMPLE_LENGTHS if length <= max_model_len]
    return {
        "block_size": runner.block_size,
        "num_blocks": runner.num_blocks,
        "block_bytes": runner.block_bytes,
        "requests_by_length": {str(n): runner.num_blocks // -(-n // runner.block_size) for n in lengths},
    }


def _capacity_line(capacity: Mapping[str, Any]) -> str:
    size, blocks, bytes_each = capacity["block_size"], capacity["num_blocks"], capacity["block_bytes"]
    fits = ", ".join(f"{count} of {length}" for length, count in capacity["requests_by_length"].items())
    return (
        f"KV cache: {bytes_each // size:,} bytes a token, {blocks} blocks of {size} tokens "
        f"({shown_bytes(blocks * bytes_each)}); requests that fit, by tokens: {fits}"
    )


def _parity_line(report: LogitsReport) -> str:
    return (
        f"{report.num_positions} positions: normalised mean square error {report.nmse:.1e}, max abs "
        f"{report.max_abs:.1e}, most likely token the same in {report.agreement:.1%}"
    )


def _engine_sha256() -> str:
    """Returns the hash of the engine's own code, which decides what a model computes."""
    digest = hashlib.sha256()
    root = Path(backends.llm.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
