"""Texts to tokens before the engine sees them, with a bound on how long a text may be."""

from __future__ import annotations

from functools import cached_property

from backends.llm.errors import RequestRefused
from backends.llm.tokenizers.base import Tokenizer

# Making tokens of a text takes about a second and 100 MB for a megabyte; shorter ones are not worth a look.
_SHORT_BYTES_A_TOKEN = 16
# Normalisation may make a text shorter: three bytes of a full-width letter become one.
_NORMALISATION = 4


class PromptEncoder:
    """The tokens of prompts.

    Args:
        tokenizer: of the model.
        max_model_len: tokens of a prompt and its answer together.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Returns a text's tokens, with the model's special ones.

        Raises:
            InvalidRequest: the text has no tokens in this vocabulary.
            RequestRefused: it is so long that it cannot fit, whatever its tokens are.
        """
        num_bytes = len(text.encode(errors="replace"))
        if num_bytes > _SHORT_BYTES_A_TOKEN * self._max_model_len and num_bytes > self._max_bytes:
            raise RequestRefused(
                f"the prompt has {num_bytes:,} bytes of text, {self._max_bytes:,} at most fit: prompt and answer "
                f"together have room for {self._max_model_len} tokens",
                "too_long",
            )
        return tuple(self._tokenizer.encode(text))

    @cached_property
    def _max_bytes(self) -> int:
        """No text with more bytes has few enough tokens; making this takes 100 ms for a large vocabulary."""
        longest = max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))
        return _NORMALISATION * longest * self._max_model_len
