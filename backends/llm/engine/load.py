"""From files to an engine: the model, its tokenizer, the runner for this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.engine import LLMEngine
from backends.llm.loaders import load_model
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import UsageError, did_you_mean, one_of

RUNNERS = ("openvino", "torch")


def load_engine(path: Path, engine_config: Mapping[str, Any]) -> LLMEngine:
    """Returns an engine for a model on disk.

    Args:
        path: a GGUF file or a Hugging Face folder.
        engine_config: `runner` ("openvino" or "torch"), `num_draft_tokens` (of LLMEngine), and the fields of
            `SchedulerConfig` and of the runner's options.

    Raises:
        ModelkilnError: a model that cannot be read, or an option that does not exist or fit.
    """
    options = dict(engine_config)
    runner_name = options.pop("runner", "openvino")
    num_draft_tokens = options.pop("num_draft_tokens", 0)
    if runner_name not in RUNNERS:
        raise UsageError(f"runner is '{runner_name}'; allowed: {one_of(RUNNERS)}")
    options_class, make_runner = _openvino() if runner_name == "openvino" else _torch()
    scheduler_names = {field.name for field in fields(SchedulerConfig)}
    runner_names = {field.name for field in fields(options_class)}
    for name in options:
        if name not in scheduler_names | runner_names:
            allowed = scheduler_names | runner_names | {"runner", "num_draft_tokens"}
            raise UsageError(f"there is no option '{name}'{did_you_mean(name, allowed)}; allowed: {one_of(allowed)}")
    try:
        config = SchedulerConfig(**{name: value for name, value in options.items() if name in scheduler_names})
    except ValueError as error:
        raise UsageError(str(error)) from None
    runner_options = options_class(**{name: value for name, value in options.items() if name in runner_names})
    tokenizer = load_tokenizer(path)
    runner = make_runner(load_model(path), runner_options)
    return LLMEngine(runner, tokenizer, config, num_draft_tokens=num_draft_tokens)


def _openvino() -> tuple[Any, Any]:
    from backends.llm.runners.openvino import OpenVinoOptions, OpenVinoRunner

    return OpenVinoOptions, OpenVinoRunner


def _torch() -> tuple[Any, Any]:
    from backends.llm.runners.torch_runner import TorchOptions, torch_runner

    return TorchOptions, torch_runner
