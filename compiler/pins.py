"""Which versions of a model are served: the newest, or those that it is pinned to, by Triton's version policy."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from compiler.errors import RepositoryError
from compiler.llm.config import BACKEND
from compiler.recorded import verify_again
from compiler.repository import Published, Repository
from compiler.triton_config import config_from_text, text_from_config


def pin(repository: Repository, model: str, versions: Sequence[int]) -> None:
    """Proves versions again and lets a server load these alone; without any, the newest as it is before any pin.

    config.pbtxt becomes that of the versions, in one step; a server reads it when it loads the model.

    Raises:
        UsageError: no such model or version.
        RepositoryError: a version is not what was proved, or they need different configs; nothing changes.
    """
    wanted = [repository.find(f"{model}:{version}") for version in sorted(set(versions))] or [repository.find(model)]
    config = config_from_text(_common_config(wanted), f"{model}/manifest.json")
    for published in wanted:
        _prove(repository, published)
    if versions:
        config.version_policy.specific.versions.extend(published.version for published in wanted)
    repository.replace_config(model, text_from_config(config))


def _common_config(wanted: Sequence[Published]) -> str:
    texts: list[str] = []
    for published in wanted:
        text = published.manifest.get("config")
        if not isinstance(text, str):
            raise RepositoryError(
                f"{published.model} version {published.version} does not carry its config.pbtxt: it is of an older "
                "modelkiln",
                hint="build it again: compile build SPEC --force",
            )
        if texts and text != texts[0]:
            first, changed = wanted[0], list(difflib.unified_diff(texts[0].split("\n"), text.split("\n"), n=0))[3:]
            raise RepositoryError(
                f"{first.model}: the versions {first.version} and {published.version} have different config.pbtxt, and "
                f"Triton has one for all versions of a model: {'; '.join(line for line in changed if line[0] != '@')}",
                hint="pin one of them, or build them with the same tensors, target and serving",
            )
        texts.append(text)
    return texts[0]


def _prove(repository: Repository, published: Published) -> None:
    """Compares a version with what it carries to be compared with; where that is nothing, its files' hashes."""
    shown = f"{published.model} version {published.version}"
    if published.manifest.get("backend") == BACKEND:
        from compiler.llm.verify import verify_llm

        problem = verify_llm(repository, published).problem
    elif published.manifest.get("references"):
        problem = "; ".join(
            f"{c.case}, output '{c.output}': {c.problem}" for c in verify_again(repository, published).failures
        )
    else:
        problem = "; ".join(repository.damage(published))
    if problem:
        raise RepositoryError(
            f"{shown} is not what was published: {problem}",
            hint=f"compile verify {published.model}:{published.version}",
        )
