"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
        vocab_size: ids are below it.
        bos_token_id: what stands before every prompt, or None.
        eos_token_ids: tokens that end an answer.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text; special tokens written in the text are recognised."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int, *, with_special: bool = False) -> bytes:
        """Returns the bytes of one token, for streams and logprobs; empty for a special one unless `with_special`."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Renders the model's chat template in a sandbox and returns its tokens, with no second BOS.

        Raises:
            ModelkilnError: the model has no template, or it fails on these messages.
        """
        ...

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the text that `chat` makes tokens of, without further special tokens; raises as `chat` does.

        Args:
            settings: more of what the template may ask for by name.
        """
        ...
