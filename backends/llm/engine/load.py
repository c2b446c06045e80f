"""From files to an engine: the model, its tokenizer, the runner for this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.engine import LLMEngine
from backends.llm.loaders import LoadedModel, load_model
from backends.llm.runners.base import ModelRunner
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import ModelRefused, UsageError, did_you_mean, one_of

RUNNERS = ("openvino", "torch")
SETTINGS_FILE = "engine.json"  # beside a model that `compile llm` published


@dataclass(frozen=True)
class EngineSettings:
    """The options of an engine, checked.

    Attributes:
        runner_options: OpenVinoOptions or TorchOptions.
        num_draft_tokens: see LLMEngine.
    """

    runner: str
    runner_options: Any
    scheduler: SchedulerConfig
    num_draft_tokens: int

    def open_runner(self, model: LoadedModel) -> ModelRunner:
        """Returns the runner with the model's weights in it."""
        runner: ModelRunner = _runner_parts(self.runner)[1](model, self.runner_options)
        return runner


def engine_settings(options: Mapping[str, Any]) -> EngineSettings:
    """Checks options by name.

    Args:
        options: `runner` ("openvino" or "torch"), `num_draft_tokens` (of LLMEngine), and the fields of
            `SchedulerConfig` and of the runner's options.

    Raises:
        UsageError: an option does not exist, or has a value that is not allowed.
    """
    rest = dict(options)
    runner = rest.pop("runner", "openvino")
    if runner not in RUNNERS:
        raise UsageError(f"runner is '{runner}'; allowed: {one_of(RUNNERS)}")
    num_draft_tokens = rest.pop("num_draft_tokens", 0)
    if type(num_draft_tokens) is not int or not 0 <= num_draft_tokens <= 64:
        raise UsageError(f"num_draft_tokens is {num_draft_tokens!r}; allowed: 0 to 64")
    options_class = _runner_parts(runner)[0]
    scheduler_names = {field.name for field in fields(SchedulerConfig)}
    runner_names = {field.name for field in fields(options_class)}
    for name in rest:
        if name not in scheduler_names | runner_names:
            allowed = scheduler_names | runner_names | {"runner", "num_draft_tokens"}
            raise UsageError(f"there is no option '{name}'{did_you_mean(name, allowed)}; allowed: {one_of(allowed)}")
    try:
        scheduler = SchedulerConfig(**{name: value for name, value in rest.items() if name in scheduler_names})
    except ValueError as error:
        raise UsageError(str(error)) from None
    runner_options = options_class(**{name: value for name, value in rest.items() if name in runner_names})
    return EngineSettings(runner, runner_options, scheduler, num_draft_tokens)


def load_engine(path: Path, engine_config: Mapping[str, Any]) -> LLMEngine:
    """Returns an engine for a model on disk.

    Args:
        path: a GGUF file, a Hugging Face folder, or a version that `compile llm` published.
        engine_config: see `engine_settings`; they go before those that a published version carries.

    Raises:
        ModelkilnError: a model that cannot be read, or an option that does not exist or fit.
    """
    stored = stored_settings(path)
    model_path = path / stored.pop("model") if "model" in stored else path
    options = {**stored, **engine_config}
    if stored and options.get("runner", "openvino") == "openvino":
        options.setdefault("graph_dir", path)  # the graph that was proved may be there
    settings = engine_settings(options)
    tokenizer = load_tokenizer(model_path)
    runner = settings.open_runner(load_model(model_path))
    return LLMEngine(runner, tokenizer, settings.scheduler, num_draft_tokens=settings.num_draft_tokens)


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
    model = stored.get("model")
    if model is not None and (not isinstance(model, str) or Path(model).name != model):
        raise ModelRefused(f"{file}: 'model' is {model!r}; allowed: the name of a file beside it")
    return stored


def _runner_parts(runner: str) -> tuple[Any, Any]:
    """Returns the options and the maker of a runner; heavy packages are imported here."""
    if runner == "torch":
        from backends.llm.runners.torch_runner import TorchOptions, torch_runner

        return TorchOptions, torch_runner
    from backends.llm.runners.openvino import OpenVinoOptions, OpenVinoRunner

    return OpenVinoOptions, OpenVinoRunner
