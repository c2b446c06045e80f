"""Whether a repository's config.pbtxt files say all there is to say, so that Triton need not ask the models."""

from __future__ import annotations

from compiler.errors import ModelkilnError
from compiler.repository import Repository
from compiler.triton_config import CONFIG_FILE, config_from_text

# Backends that exist in Python only, and complete nothing unless the model does.
_ASKED_BY_NOBODY = ("python", "llm")
_COMPLETES = "auto_complete_config"  # what a Python model calls it


def configs_are_complete(repository: Repository) -> bool:
    """Returns whether every model is an ensemble, published by `compile`, or a Python model with a whole config.

    Triton completes a config by starting the model's process twice, first to ask: seconds for each model.
    """
    return all(_is_complete(repository, name) for name in repository.models())


def _is_complete(repository: Repository, name: str) -> bool:
    folder = repository.path / name
    try:
        config = config_from_text((folder / CONFIG_FILE).read_text(encoding="utf-8"), name)
        if config.platform == "ensemble":
            return True
        if any(_COMPLETES in path.read_text(encoding="utf-8") for path in folder.glob("*/model.py")):
            return False
        published = repository.latest(name) is not None
    except (OSError, UnicodeDecodeError, ModelkilnError):
        return False  # `compile check` is what complains of it
    return published or (config.backend in _ASKED_BY_NOBODY and bool(config.input) and bool(config.output))
