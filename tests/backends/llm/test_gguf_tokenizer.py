"""Tokenizers of GGUF files against transformers, and against SentencePiece's rule done the slow way."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.llm.errors import InvalidRequest
from backends.llm.loaders.gguf_file import open_gguf
from backends.llm.loaders.gguf_metadata import Metadata
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.gguf_tokenizer import CONTROL, NORMAL, SPACE, USER_DEFINED, tokenizer_from_metadata
from backends.llm.tokenizers.text_tokenizer import TextTokenizer
from compiler.errors import ModelRefused
from tests.backends.llm.texts import NUMERALS, TEXTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(smollm2)
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer


def _theirs(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _compare(ours: Any, theirs: Any, texts: tuple[str, ...]) -> None:
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_smollm2_is_transformers(smollm2: Path, smollm2_tokenizer: TextTokenizer) -> None:
    theirs = _theirs(smollm2)
    _compare(smollm2_tokenizer, theirs, TEXTS)
    messages = [
        {"role": "user", "content": "Hello there <b>"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "x\n"},
    ]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True)["input_ids"]
        assert smollm2_tokenizer.chat(messages, add_generation_prompt=prompt) == expected
        with_system = [{"role": "system", "content": "Be brief."}, *messages]
        expected = theirs.apply_chat_template(with_system, add_generation_prompt=prompt, tokenize=True)["input_ids"]
        assert smollm2_tokenizer.chat(with_system, add_generation_prompt=prompt) == expected


def test_half_of_a_surrogate_pair_is_refused_and_not_a_crash(smollm2_tokenizer: TextTokenizer) -> None:
    """JSON can carry one: "\\ud83d"."""
    with pytest.raises(InvalidRequest, match="the prompt is not Unicode text"):
        smollm2_tokenizer.encode("a\ud83db")


def test_smollm2_cuts_numerals_one_by_one(smollm2_tokenizer: TextTokenizer) -> None:
    """As its tokenizer.json and llama.cpp do; transformers leaves that rule out where it reads a GGUF file."""
    ids = smollm2_tokenizer.encode(NUMERALS)
    assert b"\xc2\xb2" in [smollm2_tokenizer.token_bytes(i) for i in ids]
    assert b" \xc2" not in [smollm2_tokenizer.token_bytes(i) for i in ids]
    assert smollm2_tokenizer.decode(ids) == NUMERALS


def test_smollm2_ids(smollm2_tokenizer: TextTokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.bos_token_id is None  # its metadata name one, and that it is not to be added
    assert smollm2_tokenizer.eos_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert smollm2_tokenizer.encode("<|im_end|>") == [2]
    assert smollm2_tokenizer.token_bytes(2) == b"" and smollm2_tokenizer.decode([2], skip_special_tokens=False) == (
        "<|im_end|>"
    )
    assert smollm2_tokenizer.token_bytes(49152) == b""


def test_the_bytes_of_tokens_put_together_are_the_text(smollm2_tokenizer: TextTokenizer) -> None:
    for text in (*TEXTS[:25], NUMERALS):
        ids = smollm2_tokenizer.encode(text)
        assert b"".join(smollm2_tokenizer.token_bytes(i) for i in ids) == text.encode(), text
    half = smollm2_tokenizer.encode("🚀")[:1]
    assert smollm2_tokenizer.decode(half) == "\ufffd" and smollm2_tokenizer.token_bytes(half[0]) == "🚀".encode()[:2]


@pytest.mark.slow
def test_gemma3_is_transformers(gemma3: Path) -> None:
    ours = load_tokenizer(gemma3)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (262144, 2, {1, 106})
    assert ours.encode("")[0] == 2 and ours.encode("", add_special_tokens=False) == []
    _compare(ours, _theirs(gemma3), (*TEXTS, NUMERALS))
    with pytest.raises(InvalidRequest, match="no chat template"):
        ours.chat([{"role": "user", "content": "hi"}])


def test_gemma3_is_sentencepiece_done_slowly(gemma3: Path) -> None:
    metadata = open_gguf(gemma3).metadata
    ours = tokenizer_from_metadata(metadata)
    tokens = metadata.texts("tokenizer.ggml.tokens")
    scores = metadata.numbers("tokenizer.ggml.scores", length=len(tokens))
    kinds = metadata.numbers("tokenizer.ggml.token_type", length=len(tokens))
    pieces = {t: float(s) for t, s, k in zip(tokens, scores, kinds, strict=True) if k == NORMAL}
    cut_out = [t for t, k in zip(tokens, kinds, strict=True) if k in (CONTROL, USER_DEFINED)]
    for text in [t for t in TEXTS if not any(token in t for token in cut_out)]:
        expected = _merged_slowly(text.replace(" ", SPACE), pieces)
        ids = ours.encode(text, add_special_tokens=False)
        found = [tokens[i] for i in ids if not tokens[i].startswith("<0x")]
        assert found == [p for p in expected if p in pieces], text
        assert b"".join(ours.token_bytes(i) for i in ids) == text.encode()


def _merged_slowly(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: again and again the neighbours that make the best piece, the leftmost of equal ones."""
    parts = list(text)
    while True:
        made = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not made:
            return parts
        at = min(made)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


_WORDS = st.text(alphabet="abcd" + SPACE, min_size=2, max_size=4)


@given(words=st.lists(_WORDS, min_size=1, max_size=25, unique=True), texts=st.lists(st.text("abcd ", max_size=20)))
@settings(max_examples=150, deadline=None)
def test_any_sentencepiece_vocabulary_is_merged_by_its_scores(words: list[str], texts: list[str]) -> None:
    scores = {character: 0.0 for character in "abcd" + SPACE} | {w: -float(i) for i, w in enumerate(words, start=1)}
    ours = tokenizer_from_metadata(_sentencepiece(scores, add_space_prefix=False))
    tokens = ["<unk>", *scores]
    for text in texts:
        found = [tokens[i] for i in ours.encode(text, add_special_tokens=False)]
        assert found == _merged_slowly(text.replace(" ", SPACE), scores)


def _sentencepiece(scores: dict[str, float], **changes: Any) -> Metadata:
    tokens = ["<unk>", *scores]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0, *scores.values()], np.float32),
        "token_type": np.array([2] + [NORMAL] * len(scores), np.int32),
        "unknown_token_id": 0,
        "add_bos_token": False,
        **changes,
    }
    return Metadata("m.gguf", {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None})


def test_llama_puts_a_space_before_a_text_and_takes_it_away() -> None:
    scores = {SPACE: 0.0, "a": 0.0, "b": 0.0, f"{SPACE}a": -1.0, "ab": -2.0, "<s>": 0.0}
    kinds = np.array([2, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, CONTROL], np.int32)
    ours = tokenizer_from_metadata(
        _sentencepiece(scores, token_type=kinds, bos_token_id=6, add_bos_token=None, add_space_prefix=None)
    )
    assert ours.bos_token_id == 6  # the default of this kind of tokenizer
    assert ours.encode("a ab") == [6, 4, 4, 3]
    assert ours.decode([6, 4, 4, 3]) == "a ab" and ours.token_bytes(4) == b" a"
    assert ours.encode("") == [6]


def _byte_level(**changes: Any) -> Metadata:
    tokens = ["a", "b", "c", "ab", "abc", "Ġ", "<end>", "<tool>"]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": np.array([NORMAL] * 6 + [CONTROL, USER_DEFINED], np.int32),
        "merges": ["a b", "ab c"],
        "eos_token_id": 6,
        **changes,
    }
    return Metadata("m.gguf", {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None})


def test_added_tokens_are_found_first_and_only_control_tokens_have_no_text() -> None:
    ours = tokenizer_from_metadata(_byte_level())
    assert ours.encode("abc<tool>ab<end>a") == [4, 7, 3, 6, 0]
    assert ours.decode([4, 7, 3, 6, 0]) == "abc<tool>aba" and ours.token_bytes(7) == b"<tool>"
    assert ours.eos_token_ids == {6}


def test_bos_and_eos_are_added_where_the_metadata_say_so() -> None:
    ours = tokenizer_from_metadata(_byte_level(add_bos_token=True, add_eos_token=True, bos_token_id=7))
    assert ours.encode("ab") == [7, 3, 6] and ours.encode("ab", add_special_tokens=False) == [3]
    assert ours.bos_token_id == 7
    # Llama 3's kind adds BOS without being told.
    assert tokenizer_from_metadata(_byte_level(pre="llama-bpe", bos_token_id=7)).encode("ab") == [7, 3]


@pytest.mark.parametrize(
    ("name", "same"), [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")]
)
def test_other_names_of_the_ways_to_cut_words(name: str, same: str) -> None:
    tokens = {"tokens": [*"abc", "Ġ", "1", "2", "3", "4", "e", "\u0301", "Ì", "ģ", "é", "Ã", "©", "<end>"]}
    changes = {**tokens, "token_type": None, "merges": [], "eos_token_id": 15, "bos_token_id": 15}
    ours, theirs = (tokenizer_from_metadata(_byte_level(**changes, pre=pre)) for pre in (name, same))
    for text in ("abc", "a 1234 b", "e\u0301"):
        assert ours.encode(text) == theirs.encode(text)


def test_words_are_cut_as_transformers_cuts_them() -> None:
    """Vocabularies of words learned from our texts; the rules of Qwen 2 and of Llama 3."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator([*TEXTS, NUMERALS] * 3, vocab_size=900, min_frequency=1, show_progress=False)
    import json

    model = json.loads(learned.to_str())["model"]
    vocabulary, merges = model["vocab"], [tuple(m) for m in model["merges"]]
    metadata = _byte_level(
        tokens=sorted(vocabulary, key=vocabulary.__getitem__),
        token_type=None,
        merges=[" ".join(m) for m in merges],
        eos_token_id=None,
    )
    qwen = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    ours = tokenizer_from_metadata(metadata)
    for text in (*TEXTS, NUMERALS):
        if "<|endoftext|>" not in text:  # a token that their class adds
            assert ours.encode(text) == qwen.encode(text), text
    llama = tokenizer_from_metadata(
        Metadata(
            "m.gguf", {**metadata.values, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
        )
    )
    pattern = tokenizers.Regex(TikTokenConverter(vocab_file="").pattern)
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(pattern, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in (*TEXTS, NUMERALS):
        assert llama.encode(text) == theirs.encode(text).ids, text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'tokenizer.ggml.model' is 'bert'; wanted: gpt2 or llama"),
        ({"pre": "tekken"}, "'tokenizer.ggml.pre' is 'tekken'; wanted: gpt-2, llama-bpe, qwen2, smollm"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' is in the vocabulary twice"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"token_type": np.array([1], np.int32)}, "is an array of 1; wanted: an array of 8 numbers"),
        ({"merges": ["ab"]}, "holds 'ab'; wanted: two pieces"),
        ({"merges": ["a x"]}, "do not fit together"),
        ({"eos_token_id": 8}, "'tokenizer.ggml.eos_token_id' is 8; wanted: an integer from 0 to 7"),
        (
            {"add_bos_token": True},
            "'tokenizer.ggml.bos_token_id' is missing; wanted: a token, since BOS is to be added",
        ),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is 1; wanted: true or false"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelRefused) as caught:
        tokenizer_from_metadata(_byte_level(**changes))
    assert words in str(caught.value)
