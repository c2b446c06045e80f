"""From files to an engine: the model, its tokenizer, the runner for this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.draft import open_draft
from backends.llm.engine.engine import LLMEngine
from backends.llm.loaders import LoadedModel, load_model
from backends.llm.runners.base import ModelRunner
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import ModelRefused, UsageError, did_you_mean, one_of

RUNNERS = ("auto", "numba", "openvino", "torch")
DRAFT_MODEL_TOKENS = 4  # that a draft model proposes at most where nothing else is said
SETTINGS_FILE = "engine.json"  # beside a model that `compile llm` published


@dataclass(frozen=True)
class EngineSettings:
    """The options of an engine, checked.

    Attributes:
        runner: "auto" is what is fastest on this machine's CPU: numba or openvino.
        runner_options: CpuOptions or TorchOptions.
        num_draft_tokens: see LLMEngine.
        draft_model: a smaller model of the same vocabulary that proposes tokens; None is prompt lookup.
    """

    runner: str
    runner_options: Any
    scheduler: SchedulerConfig
    num_draft_tokens: int
    draft_model: Path | None = None

    def open_runner(self, model: LoadedModel) -> ModelRunner:
        """Returns the runner with the model's weights in it."""
        runner: ModelRunner = _runner_parts(self.runner)[1](model, self.runner_options, self.scheduler)
        return runner


def engine_settings(options: Mapping[str, Any]) -> EngineSettings:
    """Checks options by name.

    Args:
        options: `runner` (one of RUNNERS), `num_draft_tokens` (of LLMEngine), `draft_model` (a path; up to 4 tokens
            where `num_draft_tokens` is not given), and the fields of `SchedulerConfig` and of the runner's options.

    Raises:
        UsageError: an option does not exist, or has a value that is not allowed.
    """
    rest = dict(options)
    runner = rest.pop("runner", "auto")
    if runner not in RUNNERS:
        raise UsageError(f"runner is '{runner}'; allowed: {one_of(RUNNERS)}")
    draft_model = rest.pop("draft_model", None)
    if draft_model is not None and not isinstance(draft_model, str | Path):
        raise UsageError(f"draft_model is {draft_model!r}; allowed: the path of a model")
    num_draft_tokens = rest.pop("num_draft_tokens", 0 if draft_model is None else DRAFT_MODEL_TOKENS)
    if type(num_draft_tokens) is not int or not 0 <= num_draft_tokens <= 64:
        raise UsageError(f"num_draft_tokens is {num_draft_tokens!r}; allowed: 0 to 64")
    options_class = _runner_parts(runner)[0]
    scheduler_names = {field.name for field in fields(SchedulerConfig)}
    runner_names = {field.name for field in fields(options_class)}
    for name in rest:
        if name not in scheduler_names | runner_names:
            allowed = scheduler_names | runner_names | {"runner", "num_draft_tokens", "draft_model"}
            raise UsageError(f"there is no option '{name}'{did_you_mean(name, allowed)}; allowed: {one_of(allowed)}")
    try:
        scheduler = SchedulerConfig(**{name: value for name, value in rest.items() if name in scheduler_names})
    except ValueError as error:
        raise UsageError(str(error)) from None
    runner_options = options_class(**{name: value for name, value in rest.items() if name in runner_names})
    path = None if draft_model is None or not num_draft_tokens else Path(draft_model)
    return EngineSettings(runner, runner_options, scheduler, num_draft_tokens, path)


def load_engine(path: Path, engine_config: Mapping[str, Any]) -> LLMEngine:
    """Returns an engine for a model on disk.

    Args:
        path: a GGUF file, a Hugging Face folder, or a version that `compile llm` published.
        engine_config: see `engine_settings`; they go before those that a published version carries.

    Raises:
        ModelkilnError: a model that cannot be read, or an option that does not exist or fit.
    """
    model_path, settings = settings_for(path, engine_config)
    tokenizer = load_tokenizer(model_path)
    model = load_model(model_path)
    draft = None if settings.draft_model is None else open_draft(settings, tokenizer, model.config)
    if draft is not None:
        settings = draft.settings
    runner = settings.open_runner(model)
    try:
        proposer = draft.proposer(min(settings.scheduler.max_model_len, runner.max_model_len)) if draft else None
    except BaseException:
        runner.close()
        raise
    return LLMEngine(
        runner, tokenizer, settings.scheduler, num_draft_tokens=settings.num_draft_tokens, proposer=proposer
    )


def settings_for(path: Path, engine_config: Mapping[str, Any]) -> tuple[Path, EngineSettings]:
    """Returns where a model's weights are, and its settings with those that a published version carries.

    Raises:
        ModelkilnError: an option does not exist or fit, or what the version says is damaged.
    """
    stored = stored_settings(path)
    model_path = path / stored.pop("model") if "model" in stored else path
    if "draft_model" in stored:
        stored["draft_model"] = path / stored["draft_model"]
    options = {**stored, **engine_config}
    if stored and options.get("runner", "auto") != "torch":
        options.setdefault("graph_dir", path)  # what was proved may be there
    return model_path, engine_settings(options)


def stored_settings(path: Path) -> dict[str, Any]:
    """Returns what a published version says of itself; nothing for other models.

    Raises:
        ModelRefused: the file is damaged.
    """
    file = path / SETTINGS_FILE
    if not file.is_file():
        return {}
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} is not valid JSON: {error}") from None
    if not isinstance(stored, dict):
        raise ModelRefused(f"{file} holds no object")
    for key in ("model", "draft_model"):
        name = stored.get(key)
        if name is not None and (not isinstance(name, str) or Path(name).name != name):
            raise ModelRefused(f"{file}: '{key}' is {name!r}; allowed: the name of a file beside it")
    return stored


def _runner_parts(runner: str) -> tuple[Any, Any]:
    """Returns the options and the maker of a runner; heavy packages are imported here."""
    if runner == "torch":
        from backends.llm.runners.torch_runner import TorchOptions, torch_runner

        def open_torch(model: LoadedModel, options: TorchOptions, scheduler: SchedulerConfig) -> ModelRunner:
            tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
            return torch_runner(model, options, max_num_batched_tokens=tokens, max_num_seqs=seqs)

        return TorchOptions, open_torch
    from backends.llm.runners.cpu import open_cpu_runner
    from backends.llm.runners.cpu_options import CpuOptions

    return CpuOptions, lambda model, options, scheduler: open_cpu_runner(runner, model, options)
