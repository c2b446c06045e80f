"""What the linter says of a model for the `llm` backend: its config.pbtxt and its version folder. Loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.llm.engine.load import SETTINGS_FILE, engine_settings, stored_settings
from backends.llm.runners.cpu import missing_package
from backends.llm.serving.options import ServiceOptions, check_instances
from compiler.errors import ModelkilnError


def llm_problems(config: Any, folder: Path | None) -> list[str]:
    """Returns what would keep a model from being served.

    Args:
        config: the ModelConfig.
        folder: of the newest version, or None where there is none.
    """
    problems = _config_problems(config)
    return problems + (_folder_problems(folder) if folder is not None else [])


def _config_problems(config: Any) -> list[str]:
    problems = []
    if not config.model_transaction_policy.decoupled:
        problems.append("model_transaction_policy.decoupled is not true: an answer comes in many responses")
    if config.max_batch_size > 0:
        problems.append(f"max_batch_size is {config.max_batch_size}; it must be 0: the engine batches by itself")
    for check in (
        lambda: check_instances([(group.count or 1, list(group.gpus)) for group in config.instance_group]),
        lambda: ServiceOptions.from_parameters({key: p.string_value for key, p in config.parameters.items()}),
    ):
        try:
            check()
        except ModelkilnError as error:
            problems.append(error.message)
    return problems


def _folder_problems(folder: Path) -> list[str]:
    version = f"version {folder.name}"
    if not (folder / SETTINGS_FILE).is_file():
        return [f"{version} has no {SETTINGS_FILE}, which compile llm writes"]
    try:
        stored = stored_settings(folder)
        model, draft = stored.pop("model", None), stored.get("draft_model")
        missing = missing_package(engine_settings(stored).runner)
    except ModuleNotFoundError as error:
        missing = error.name or ""
    except ModelkilnError as error:
        return [f"{version}: {error.message.replace(f'{folder}/', '')}"]
    if missing:
        return [f"{version}: its runner needs {missing}, which is not installed"]
    files = [name for name in (model, draft) if name is not None and not (folder / name).is_file()]
    if model is not None or files:
        return [f"{version} has no {name}" for name in files]
    absent = [name for name in ("config.json", "*.safetensors") if not any(folder.glob(name))]
    return [f"{version} has no {' and no '.join(absent)}"] if absent else []
