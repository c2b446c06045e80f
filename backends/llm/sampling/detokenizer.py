"""Detokenizer: tokens to text one by one; only whole characters leave, and together they are the text of all tokens."""

from __future__ import annotations

import codecs

from backends.llm.tokenizers.base import Tokenizer


class Detokenizer:
    """The text of one answer as a continuation of its prompt: a SentencePiece model's leading space is kept.

    Works on the bytes of tokens, so it needs no look back: a character that spans several tokens (byte-level BPE, byte
    fall-back) leaves with the last of them, bytes that are no UTF-8 leave as U+FFFD as `Tokenizer.decode` has them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that are complete with this token."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, with_special=not self._skip_special_tokens))

    def finish(self) -> None:
        """Drops the beginning of a character that no token completed."""
        self._utf8.reset()
