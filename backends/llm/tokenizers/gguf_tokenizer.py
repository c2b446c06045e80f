"""The tokenizer of a GGUF file, built from its metadata as Hugging Face's converters build it from the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from backends.llm.loaders.gguf_file import open_gguf
from backends.llm.loaders.gguf_metadata import Metadata
from backends.llm.tokenizers.chat_template import ChatTemplate
from backends.llm.tokenizers.failing import failing
from backends.llm.tokenizers.sentencepiece_merges import merges_from_scores
from backends.llm.tokenizers.text_tokenizer import TextTokenizer, bytes_of_byte_level, bytes_of_sentencepiece
from compiler.errors import ModelRefused, one_of

_PREFIX = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # enum llama_token_type of llama.cpp
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Tokens that end an answer, whatever the metadata's one end token is; the same list as llama.cpp's, for our models.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By `tokenizer.ggml.pre`: how a text is cut into words before merging, as the models' tokenizer.json have it.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "llama-bpe": lambda: _split(_WORDS % "{1,3}"),
    "qwen2": lambda: _split(_WORDS % ""),
}
# Other names for them, in files of older converters and of distilled models; the same as in llama.cpp.
_OTHER_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def load_gguf_tokenizer(path: Path) -> TextTokenizer:
    """Builds the tokenizer and compiles the chat templates.

    Raises:
        ModelRefused: the file is damaged, or has a tokenizer that is not supported.
    """
    return tokenizer_from_metadata(open_gguf(path).metadata)


def tokenizer_from_metadata(m: Metadata) -> TextTokenizer:
    tokens = m.texts(f"{_PREFIX}.tokens")
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise ModelRefused(f"{m.shown}: the token {twice!r} is in the vocabulary twice")
    kinds = _kinds(m, len(tokens))
    model = m.text(f"{_PREFIX}.model")
    if model == "gpt2":
        tokenizer, piece_bytes = _byte_level(m, tokens), bytes_of_byte_level
    elif model == "llama":
        tokenizer, piece_bytes = _sentencepiece(m, tokens, kinds), bytes_of_sentencepiece
    else:
        m.refuse(f"{_PREFIX}.model", "gpt2 or llama")
    tokenizer.add_tokens(_added(tokens, kinds))
    _add_ends(m, tokenizer, tokens, model)
    return TextTokenizer(
        tokenizer,
        piece_bytes=piece_bytes,
        strips_space=model == "llama" and m.flag(f"{_PREFIX}.add_space_prefix", default=True),
        eos_token_ids=_eos_token_ids(m, tokens, kinds),
        templates=_templates(m),
        special_tokens=_special_tokens(m, tokens),
    )


def _kinds(m: Metadata, count: int) -> Sequence[int]:
    key = f"{_PREFIX}.token_type"
    if key not in m:
        return [NORMAL] * count
    return [int(k) for k in m.numbers(key, length=count)]


def _added(tokens: list[str], kinds: Sequence[int]) -> list[AddedToken]:
    """Returns the tokens that are found in a text before all else; control tokens are no part of an answer's text."""
    return [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]


def _pre(m: Metadata) -> str:
    name = m.text(f"{_PREFIX}.pre", default="gpt-2")
    return _OTHER_NAMES.get(name, name)


def _byte_level(m: Metadata, tokens: list[str]) -> tokenizers.Tokenizer:
    pre = _pre(m)
    if pre not in _PRE_TOKENIZERS:
        m.refuse(f"{_PREFIX}.pre", one_of(_PRE_TOKENIZERS))
    merges = []
    for merge in m.texts(f"{_PREFIX}.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelRefused(f"{m.shown}: metadata '{_PREFIX}.merges' holds {merge[:40]!r}; wanted: two pieces")
        merges.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = _built(m, lambda: models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(m: Metadata, tokens: list[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    scores = m.numbers(f"{_PREFIX}.scores", length=len(tokens))
    merges = merges_from_scores({t: float(s) for t, s, k in zip(tokens, scores, kinds, strict=True) if k == NORMAL})
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[_token_id(m, "unknown", tokens) or 0]
    tokenizer = _built(
        m, lambda: models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    if m.flag(f"{_PREFIX}.add_space_prefix", default=True):
        spaces.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _built(m: Metadata, build: Callable[[], Any]) -> tokenizers.Tokenizer:
    with failing(lambda why: ModelRefused(f"{m.shown}: the tokenizer's metadata do not fit together: {why}")):
        return tokenizers.Tokenizer(build())


def _token_id(m: Metadata, name: str, tokens: list[str]) -> int | None:
    key = f"{_PREFIX}.{name}_token_id"
    return m.integer(key, high=len(tokens) - 1) if key in m else None


def _add_ends(m: Metadata, tokenizer: tokenizers.Tokenizer, tokens: list[str], model: str) -> None:
    """Makes the tokenizer add BOS and EOS where the metadata, or llama.cpp's defaults without them, say so."""
    starts = model == "llama" or _pre(m) == "llama-bpe"
    wanted = {
        "bos": m.flag(f"{_PREFIX}.add_bos_token", default=starts),
        "eos": m.flag(f"{_PREFIX}.add_eos_token", default=False),
    }
    ids = {name: _token_id(m, name, tokens) for name, is_wanted in wanted.items() if is_wanted}
    for name, found in ids.items():
        if found is None:
            m.refuse(f"{_PREFIX}.{name}_token_id", f"a token, since {name.upper()} is to be added")
    if ids:
        names = {name: tokens[found] for name, found in ids.items() if found is not None}
        parts = [*([names["bos"]] if "bos" in names else []), "$A", *([names["eos"]] if "eos" in names else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(names[name], found) for name, found in ids.items()]
        )


def _eos_token_ids(m: Metadata, tokens: list[str], kinds: Sequence[int]) -> frozenset[int]:
    named = {_token_id(m, name, tokens) for name in ("eos", "eot", "eom")} - {None}
    known = {i for i, token in enumerate(tokens) if token in _ENDS and kinds[i] == CONTROL}
    return frozenset(i for i in named | known if i is not None)


def _templates(m: Metadata) -> dict[str, ChatTemplate]:
    """Returns the chat templates by name; the file's main one is "default"."""
    found = {}
    for key in m.values:
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            name = key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"
            found[name] = ChatTemplate(m.text(key), f"{m.shown}: the chat template '{name}'")
    return found


def _special_tokens(m: Metadata, tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {shown: _token_id(m, name, tokens) for name, shown in names.items()}
    return {shown: tokens[found] for shown, found in ids.items() if found is not None}
