"""What the library llguidance is given: a model's tokens as bytes, and structured outputs as grammars in its Lark."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backends.llm.errors import InvalidRequest
from backends.llm.sampling.structured_outputs import StructuredOutputs
from backends.llm.tokenizers.base import Tokenizer
from compiler.errors import EnvironmentLacks

# One optional space, or a new line with its indent, wherever JSON may have white space: without a bound a model that
# likes white space would never get on.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,8})?", "lenient": False}


def llguidance() -> Any:
    """Returns the library.

    Raises:
        EnvironmentLacks: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise EnvironmentLacks(f"llguidance cannot be used: {error}", hint="pip install 'modelkiln[llm]'") from None


def lark_from(wanted: StructuredOutputs) -> str:
    """Returns a structured output as a grammar in the library's Lark.

    Raises:
        ValueError: a GBNF grammar cannot be read.
    """
    if wanted.kind == "json":
        schema = json.loads(wanted.text)
        schema["x-guidance"] = JSON_OPTIONS  # and not what the schema brings along under this key
        return f"start: %json {json.dumps(schema, ensure_ascii=False)}"
    if wanted.kind == "regex":
        return f"start: /{llguidance().regex_to_lark(wanted.text, 'd')}/"  # "d": \d is 0 to 9, as clients mean it
    if wanted.kind == "choice":
        choices = json.loads(wanted.text)
        return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"
    try:
        return str(importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(wanted.text))
    except Exception as error:  # the library's converter of GBNF raises its own kinds, and IndexError and others
        raise ValueError(str(error)) from None


class Vocabulary:
    """The tokens as the library wants to have them.

    A token without bytes is one that no text leads to. So are those with 0xFF, which is in no UTF-8 text and which the
    library takes as the mark of a special token.

    Args:
        tokens: the bytes of each.
        encode: text to tokens as the model knows them; None where it does not matter.
    """

    is_tokenizer_wrapper = True
    special_token_ids: Sequence[int] = ()
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], eos_token_ids: frozenset[int], encode: Callable[[str], list[int]] | None = None
    ) -> None:
        self.tokens = [b"" if i in eos_token_ids or b"\xff" in data else data for i, data in enumerate(tokens)]
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = min(eos_token_ids, default=None)
        self._encode = encode
        self._ids = {data: token_id for token_id, data in enumerate(self.tokens) if data}
        self._longest = max(map(len, self._ids), default=1)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """Returns the vocabulary of a model whose logits may be wider than its tokenizer, or narrower."""
        size = min(vocab_size, tokenizer.vocab_size)
        tokens = [tokenizer.token_bytes(i) for i in range(size)] + [b""] * (vocab_size - size)
        ends = frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size)
        return cls(tokens, ends, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def as_json(self) -> dict[str, Any]:
        """Returns what `from_json` makes a vocabulary of, without `encode`."""
        return {"tokens": [data.decode("latin-1") for data in self.tokens], "eos": sorted(self.eos_token_ids)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Vocabulary:
        """Returns the vocabulary that `as_json` wrote."""
        return cls([text.encode("latin-1") for text in data["tokens"]], frozenset(data["eos"]))

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text that a grammar forces; together they have its very bytes.

        Tokenizers may add a space, know special tokens in a text, or normalise it; it is then spelt by the longest
        tokens from left to right.
        """
        data = text.encode()
        try:
            token_ids = self._encode(text) if self._encode else []
        except InvalidRequest:
            token_ids = []
        if all(i < len(self.tokens) for i in token_ids) and b"".join(self.tokens[i] for i in token_ids) == data:
            return token_ids
        return self._spelt(data)

    def _spelt(self, data: bytes) -> list[int]:
        token_ids = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break  # no token has this byte: the answer cannot go on, and its mask says so
            token_ids.append(self._ids[data[:size]])
            data = data[size:]
        return token_ids
