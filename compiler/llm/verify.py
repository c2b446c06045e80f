"""`compile verify` of a language model: the check of `compile llm`, run again on what was published."""

from __future__ import annotations

from backends.llm.engine.load import settings_for
from backends.llm.loaders import load_model
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import RepositoryError
from compiler.llm.build import is_exact
from compiler.llm.parity import (
    EXACT,
    FAST,
    LogitsReport,
    compare_logits,
    judged_prompts,
    reference_logits,
    runner_logits,
)
from compiler.repository import Published, Repository


def verify_llm(repository: Repository, published: Published) -> LogitsReport:
    """Compares the logits of the runner that serves a version with the plain decoder's on the version's own files.

    No reference outputs are stored: of a language model they are larger than what may travel with a version, and the
    weights that do travel are enough to compute them.

    Raises:
        RepositoryError: files are damaged.
        ModelkilnError: the model cannot be opened on this machine.
    """
    if problems := repository.damage(published):
        shown = f"{published.model} version {published.version}"
        raise RepositoryError(f"{shown}: {'; '.join(problems)}", hint="build it again: compile llm SOURCE --force")
    path, settings = settings_for(published.folder, {})  # with the graph that it carries, where it does
    model = load_model(path)
    limit = min(settings.scheduler.max_model_len, model.config.max_position_embeddings)
    runner = settings.open_runner(model)
    try:
        prompts = judged_prompts(load_tokenizer(path), runner, limit)
        found = runner_logits(runner, prompts)
    finally:
        runner.close()
    return compare_logits(found, reference_logits(model, prompts), EXACT if is_exact(settings) else FAST)
