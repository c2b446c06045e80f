"""A draft model beside the model that it proposes tokens for: the same vocabulary, and its share of the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends.llm.capacity import kv_bytes_per_block
from backends.llm.loaders import LoadedModel, load_model
from backends.llm.models.config import DecoderConfig
from backends.llm.runners.base import ModelRunner
from backends.llm.sampling.draft_model import DraftModelProposer
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.base import Tokenizer
from compiler.errors import ModelRefused, UsageError

if TYPE_CHECKING:
    from backends.llm.engine.load import EngineSettings


@dataclass(frozen=True)
class DraftModel:
    """A draft model, read and not yet opened.

    Attributes:
        settings: of the engine, with what the draft model leaves of the KV cache's memory.
    """

    model: LoadedModel
    settings: EngineSettings
    kv_cache_bytes: int
    vocab_size: int

    def proposer(self, max_model_len: int) -> DraftModelProposer:
        """Opens it by the same runner, with the same options.

        Args:
            max_model_len: tokens of a prompt with its answer; the cache is divided into parts of as many.

        Raises:
            UsageError: its share of the memory has no room for one request.
        """
        options = replace(self.settings.runner_options, kv_cache_bytes=self.kv_cache_bytes)
        if hasattr(options, "graph_dir"):
            options = replace(options, graph_dir=None)  # there is the graph of the other model
        runner: ModelRunner = replace(self.settings, runner_options=options).open_runner(self.model)
        blocks = -(-max_model_len // runner.block_size)
        if runner.num_blocks < blocks:
            runner.close()
            raise UsageError(
                f"the draft model has {runner.num_blocks} blocks of {runner.block_size} tokens in its share; "
                f"one request of {max_model_len} tokens needs {blocks}",
                hint="give the KV cache more memory, or make max_model_len smaller",
            )
        return DraftModelProposer(
            runner,
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=self.settings.scheduler.max_num_batched_tokens,
        )


def open_draft(settings: EngineSettings, tokenizer: Tokenizer, config: DecoderConfig) -> DraftModel:
    """Reads the draft model of the settings, and divides the memory of the KV cache between both.

    Both keep the same texts, so each gets a share in proportion to the bytes that a token takes in it.

    Args:
        tokenizer, config: of the model that verifies.

    Raises:
        ModelRefused: it cannot be read, or has another vocabulary.
    """
    path = settings.draft_model
    assert path is not None
    model = load_model(path)
    _check_vocabulary(path, load_tokenizer(path), tokenizer)
    own, other = (kv_bytes_per_block(c, "f16", 1) for c in (model.config, config))
    total: int | None = settings.runner_options.kv_cache_bytes
    if total is None:
        raise UsageError("a draft model shares the memory of the KV cache: kv_cache_bytes has to be given")
    share = total * own // (own + other)
    rest = replace(settings, runner_options=replace(settings.runner_options, kv_cache_bytes=total - share))
    return DraftModel(model, rest, share, min(config.vocab_size, model.config.vocab_size))


def _check_vocabulary(path: Path, draft: Tokenizer, target: Tokenizer) -> None:
    """Refuses a draft model whose tokens mean something else."""
    if draft.vocab_size != target.vocab_size:
        differs = f"it has {draft.vocab_size} tokens, the model {target.vocab_size}"
    elif draft.eos_token_ids != target.eos_token_ids:
        differs = f"its end tokens are {sorted(draft.eos_token_ids)}, the model's {sorted(target.eos_token_ids)}"
    else:
        others = (i for i in range(target.vocab_size) if draft.token_bytes(i) != target.token_bytes(i))
        first = next(others, None)
        if first is None:
            return
        differs = f"token {first} is {draft.token_bytes(first)!r}, the model's {target.token_bytes(first)!r}"
    raise ModelRefused(
        f"draft model {path} has another vocabulary: {differs}",
        hint="a draft model is a smaller one of the same family",
    )
