"""TextTokenizer: the `Tokenizer` of every model, over the library `tokenizers`; how ids become bytes is its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from backends.llm.errors import InvalidRequest
from backends.llm.tokenizers.chat_template import ChatTemplate
from backends.llm.tokenizers.failing import failing
from compiler.errors import ModelRefused


class TextTokenizer:
    """Text to tokens by the library, tokens to text by the bytes of each.

    The library's decoders are not used, so that the text of a whole answer is that of its stream: the bytes of its
    tokens, one after the other.

    Args:
        tokenizer: with its added tokens and with a post-processor that adds BOS and EOS where the model wants them.
        piece_bytes: the bytes of an entry of the vocabulary that is no added token.
        strips_space: a space is put before a text when it is encoded, and one is taken away when it is decoded.
        templates: chat templates by name, "default" among them; or none.
        special_tokens: what templates may name: "bos_token", "eos_token", ...
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        piece_bytes: Callable[[str], bytes],
        strips_space: bool,
        eos_token_ids: frozenset[int],
        templates: Mapping[str, ChatTemplate],
        special_tokens: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._piece_bytes = piece_bytes
        self._strips_space = strips_space
        self._eos_token_ids = eos_token_ids
        self._templates = templates
        self._special_tokens = special_tokens
        self._added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        with failing(lambda why: ModelRefused(f"the tokenizer does not work: {why}")):
            before = tokenizer.encode("").ids
        self._bos_token_id = before[0] if before and before[0] not in eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def save(self, path: Path) -> None:
        """Writes tokenizer.json, as the library `tokenizers` reads it."""
        self._tokenizer.save(str(path))

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text; special tokens written in the text are recognised.

        Raises:
            InvalidRequest: the text has no UTF-8 form (half of a surrogate pair), or characters for which the
                vocabulary has neither a token nor an unknown one.
        """
        if not text.isascii() and not _is_unicode(text):
            raise InvalidRequest("the prompt is not Unicode text: it holds half of a surrogate pair", param="prompt")
        with failing(lambda why: InvalidRequest(f"the prompt cannot be turned into tokens: {why}", param="prompt")):
            # The library lets other threads run in its call for batches alone; a megabyte of text takes a second.
            (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(i, with_special=not skip_special_tokens) for i in token_ids)
        return data.decode(errors="replace").removeprefix(" " if self._strips_space else "")

    def token_bytes(self, token_id: int, *, with_special: bool = False) -> bytes:
        """Returns the bytes of one token, for streams and logprobs; empty for a special one unless `with_special`."""
        added = self._added.get(token_id)
        if added is not None and (with_special or not added.special):
            return str(added.content).encode()
        if added is not None:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
            if piece is None:
                # A model's output may be wider than its vocabulary; such tokens have no text.
                return b""
            found = self._bytes[token_id] = self._piece_bytes(piece)
        return found

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Renders the model's chat template in a sandbox and returns its tokens: BOS where the template writes it.

        Raises:
            InvalidRequest: the model has no template, or it fails on these messages.
        """
        return self.encode(
            self.chat_text(messages, tools=tools, add_generation_prompt=add_generation_prompt),
            add_special_tokens=False,
        )

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the text that `chat` makes tokens of."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "the model has no chat template: it was not made for chats",
                param="messages",
                hint="give it a prompt, not messages",
            )
        return self._templates[name].render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
            settings=settings,
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def bytes_of_byte_level(piece: str) -> bytes:
    """Returns the bytes of a piece of a byte-level BPE, in which each character stands for one byte."""
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:  # a piece that was written as plain text
        return piece.encode()


def bytes_of_sentencepiece(piece: str) -> bytes:
    """Returns the bytes of a piece in which U+2581 stands for a space and <0x0A> for a byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Returns GPT-2's table: printable bytes of Latin-1 stand for themselves, the others for U+0100 and following."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_characters()
