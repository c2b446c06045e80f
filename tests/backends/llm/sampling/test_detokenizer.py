"""Detokenizer: what leaves, token by token, is the text of all tokens, in whole characters."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llm.sampling.detokenizer import Detokenizer
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.base import Tokenizer
from tests.backends.llm.sampling.tiny_tokenizers import byte_fallback, byte_level

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
TEXTS = ["Grüße 你好世界 👩‍👩‍👧‍👦!", "the then there", "\u0000\u0301e", "naïve — ☃ 🏳️‍🌈 ok", ""]


def stream(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in token_ids]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_in_whole_characters(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    chunks = stream(BYTE_LEVEL, token_ids)
    assert "".join(chunks) == text == BYTE_LEVEL.decode(token_ids)
    assert all("\ufffd" not in chunk for chunk in chunks)


@given(st.text(max_size=30))
def test_any_text_comes_back_from_its_bytes(text: str) -> None:
    token_ids = [BYTE_FALLBACK.library.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40), st.booleans())
def test_any_tokens_give_the_text_that_the_library_decodes(token_ids: list[int], skip: bool) -> None:
    """Random tokens are mostly broken UTF-8: only a tail that could still become a character is missing."""
    expected = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    seen = "".join(stream(BYTE_LEVEL, token_ids, skip=skip))
    assert expected.startswith(seen)
    assert expected[len(seen) :] in ("", "\ufffd")


@given(st.lists(st.sampled_from(["▁the", "▁", "é", "你", "好", ".", "▁world"]), max_size=20))
def test_pieces_of_sentencepiece_give_the_text_that_the_library_decodes(pieces: list[str]) -> None:
    token_ids = [BYTE_FALLBACK.library.token_to_id(piece) for piece in pieces]
    assert "".join(stream(BYTE_FALLBACK, token_ids)) == BYTE_FALLBACK.decode(token_ids)


def test_a_character_leaves_with_its_last_byte() -> None:
    token_ids = [BYTE_FALLBACK.library.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert stream(BYTE_FALLBACK, token_ids) == ["", "", "", "🙂"]
    assert BYTE_FALLBACK.decode(token_ids) == "🙂"


def test_g16_half_a_character_at_the_end_is_dropped() -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK)
    text = detokenizer.push(BYTE_FALLBACK.library.token_to_id("<0xE4>"))
    detokenizer.finish()
    assert text == ""
    assert json.loads(json.dumps({"content": text})) == {"content": ""}


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*BYTE_LEVEL.encode("the"), BYTE_LEVEL.library.token_to_id("<tool>"), *BYTE_LEVEL.encode("é")]
    assert "".join(stream(BYTE_LEVEL, ids)) == "theé"
    assert (
        "".join(stream(BYTE_LEVEL, ids, skip=False))
        == "the<tool>é"
        == BYTE_LEVEL.decode(ids, skip_special_tokens=False)
    )


def test_an_answer_continues_its_prompt_so_its_leading_space_stays() -> None:
    assert stream(BYTE_FALLBACK, [BYTE_FALLBACK.library.token_to_id("▁the")]) == [" the"]


@pytest.mark.parametrize("skip", [True, False])
def test_a_real_model_s_random_tokens_give_the_text_of_its_tokenizer(smollm2: Path, skip: bool) -> None:
    """Broken UTF-8, special tokens, and ids behind the vocabulary, which a model's padded output can have."""
    tokenizer = load_tokenizer(smollm2)
    rng = random.Random(0)
    parts = [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]
    broken = 0
    for _ in range(300):
        token_ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(20)]
        token_ids[::7] = [rng.randrange(20) for _ in token_ids[::7]]
        token_ids[::3] = rng.choices(parts, k=7)
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        seen = "".join(stream(tokenizer, token_ids, skip=skip))
        assert expected.startswith(seen) and expected[len(seen) :] in ("", "\ufffd")
        broken += "\ufffd" in seen
    assert broken == 300


def test_a_real_model_s_text_leaves_in_whole_characters(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    for text in TEXTS:
        chunks = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
        assert "".join(chunks) == text
        assert all("\ufffd" not in chunk for chunk in chunks)
