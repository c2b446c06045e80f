"""Small real tokenizers of both kinds, made here with the `tokenizers` library: byte-level BPE, and byte fall-back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "Grüße aus Zürich, 你好世界 👩‍👩‍👧‍👦 naïve café — 'quotes' and code: x += 1;\n\tend",
    "the the then there",
] * 20
SPECIAL = ("<eos>", "<tool>")


class TinyTokenizer:
    """The Tokenizer protocol over the library; bytes of tokens are looked up once."""

    def __init__(self, library: tokenizers.Tokenizer, token_bytes: list[bytes]) -> None:
        self.library = library
        self._bytes = token_bytes
        self.eos_token_ids = frozenset({library.token_to_id("<eos>")})
        self.bos_token_id = None

    @property
    def vocab_size(self) -> int:
        return self.library.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.library.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, *, with_special: bool = False) -> bytes:
        data = self._bytes[token_id]
        return data or (self.library.id_to_token(token_id) or "").encode() if with_special else data

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        raise NotImplementedError


def byte_level() -> TinyTokenizer:
    """GPT-2's kind: every byte is a token, merges are learned from bytes."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    # The characters that stand for bytes: printable ones for themselves, the others from 256 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printable)}
    size = library.get_vocab_size()
    names = [library.id_to_token(i) for i in range(size)]
    return TinyTokenizer(library, [b"" if n in SPECIAL else bytes(byte_of[c] for c in n) for n in names])


def byte_fallback() -> TinyTokenizer:
    """SentencePiece's kind, as Gemma has it: a space is U+2581, what is not in the vocabulary is spelt in bytes."""
    vocab = {name: i for i, name in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for piece in ["▁the", "▁", "t", "h", "e", "n", "r", "é", "▁world", "你", "好", ".", "x"]:
        vocab[piece] = len(vocab)
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    library.add_special_tokens(list(SPECIAL))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    table = []
    for name in sorted(vocab, key=lambda name: vocab[name]):
        if name in SPECIAL:
            table.append(b"")
        elif name.startswith("<0x"):
            table.append(bytes([int(name[3:5], 16)]))
        else:
            table.append(name.replace("▁", " ").encode())
    return TinyTokenizer(library, table)
