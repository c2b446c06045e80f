"""Damaged files: whatever a byte, a number or a cut does, what comes is a model or ModelRefused, in little memory."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from backends.llm.errors import InvalidRequest
from backends.llm.loaders import load_model
from backends.llm.loaders.huggingface_config import config_from_huggingface
from backends.llm.loaders.safetensors_file import open_safetensors
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.chat_template import ChatTemplate
from compiler.errors import ModelRefused
from tests.backends.llm.gguf_files import tiny

MOST_BYTES = 512 << 20
# No deadline of seconds, which a busy machine would miss; the bound on memory is the system's.
CHECKS = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Makes an allocation of more than 512 MB in all a MemoryError, which is no ModelRefused."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _opens_or_is_refused(read: Callable[[], Any]) -> bool:
    """Returns whether it opened; any other error, one of too much memory among them, fails the test."""
    with _bounded_memory():
        try:
            read()
        except (ModelRefused, InvalidRequest):
            return False
    return True


def _read_all(path: Path) -> None:
    for weight in load_model(path).weights.values():
        assert weight is not None


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
GGUF = tiny("qwen2").with_metadata(**{k.replace(".", "__"): v for k, v in TOKENIZER.items()}).to_bytes()
HEADER = 4800  # bytes of GGUF before its data, about

_positions = st.integers(0, HEADER)
_bytes = st.binary(min_size=1, max_size=9)
# What sizes and counts are most often wrong by.
_numbers = st.sampled_from([0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62, (1 << 64) - 1])


def _overwritten(data: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    changed = bytearray(data)
    for at, new in changes:
        changed[at : at + len(new)] = new[: max(0, len(data) - at)]
    return bytes(changed)


def test_the_file_that_is_damaged_is_right(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    assert _opens_or_is_refused(lambda: _read_all(path)) and _opens_or_is_refused(lambda: load_tokenizer(path))
    assert GGUF.find(b"blk.1.ffn_down.weight") + 60 < HEADER + 200


def test_the_bound_on_memory_is_one() -> None:
    with pytest.raises(MemoryError), _bounded_memory():
        np.ones(2 * MOST_BYTES, np.uint8)


@given(changes=st.lists(st.tuples(_positions, _bytes), min_size=1, max_size=4))
@CHECKS
def test_gguf_with_other_bytes(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_overwritten(GGUF, changes))
    _opens_or_is_refused(lambda: _read_all(path))
    _opens_or_is_refused(lambda: load_tokenizer(path))


@given(at=_positions, number=_numbers, size=st.sampled_from(["<I", "<Q"]))
@CHECKS
def test_gguf_with_other_numbers(tmp_path: Path, at: int, number: int, size: str) -> None:
    path = tmp_path / "m.gguf"
    number &= (1 << 8 * struct.calcsize(size)) - 1
    path.write_bytes(_overwritten(GGUF, [(at, struct.pack(size, number))]))
    _opens_or_is_refused(lambda: _read_all(path))


@given(cut=st.integers(0, len(GGUF) - 1), gone=st.integers(0, 40))
@CHECKS
def test_gguf_cut_short_or_with_bytes_gone(tmp_path: Path, cut: int, gone: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF[:cut])
    assert not _opens_or_is_refused(lambda: _read_all(path)) or cut > len(GGUF) - 32  # the padding of the last tensor
    path.write_bytes(GGUF[: cut % HEADER] + GGUF[cut % HEADER + gone :])
    _opens_or_is_refused(lambda: _read_all(path))


SAFETENSORS = save({"a": np.ones((3, 4), np.float32), "b": np.zeros(5, np.float16), "c": np.ones((2, 2), np.float32)})


def _read_safetensors(path: Path) -> None:
    file = open_safetensors(path, "m/x.safetensors")
    for name in file.tensors:
        file.read(name)


@given(changes=st.lists(st.tuples(st.integers(0, len(SAFETENSORS)), _bytes), min_size=1, max_size=4))
@CHECKS
def test_safetensors_with_other_bytes(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(_overwritten(SAFETENSORS, changes))
    _opens_or_is_refused(lambda: _read_safetensors(path))


_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "I64", "F4", "X"]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 4, 1 << 31, 1 << 62, -1]), max_size=4),
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 16, 64, 1 << 40, 1 << 63]), max_size=3),
    }
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), _entries | _json, max_size=3),
    length=st.none() | _numbers,
    data=st.sampled_from([0, 4, 16, 64]),
)
@CHECKS
def test_safetensors_with_other_headers(tmp_path: Path, header: Any, length: int | None, data: int) -> None:
    path = tmp_path / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    _opens_or_is_refused(lambda: _read_safetensors(path))


def test_an_empty_tensor_of_huge_dims_is_refused_by_name(tmp_path: Path) -> None:
    """What the fuzz found: the product is 0, and numpy has no such array."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelRefused, match=r"m/x.safetensors: tensor 'a' has the shape \[0, 4611686018427387904\]"):
        _read_safetensors(path)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a":' + b"[" * 5_000_000])
def test_a_header_of_brackets(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert not _opens_or_is_refused(lambda: _read_safetensors(path))


CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_parameters": None,
    "layer_types": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
}


@given(
    kind=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]),
    changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), _json | _numbers, min_size=1, max_size=3),
)
@CHECKS
def test_configs_with_other_values(kind: str, changes: dict[str, Any]) -> None:
    _opens_or_is_refused(lambda: config_from_huggingface({**CONFIG, "model_type": kind, **changes}, "m/config.json"))


@given(rope=st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "full_attention"]), _json))
@CHECKS
def test_configs_with_other_rope_scalings(rope: dict[str, Any]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        _opens_or_is_refused(lambda key=key: config_from_huggingface({**CONFIG, key: rope}, "m/config.json"))


_fragments = st.sampled_from(
    [
        *("{{ ", " }}", "{% for m in messages %}", "{% for i in range(100000) %}", "{% endfor %}", "{% if ", " %}"),
        *(
            "{% endif %}",
            "{% set ns = namespace(s='a') %}",
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set x %}",
            "{% endset %}",
        ),
        *(
            "{% macro f(n) %}",
            "{{ f(n) }}",
            "{{ f(1) }}",
            "{% endmacro %}",
            "{% raw %}",
            "{{ ns.s * 99999 }}",
            "m.content",
        ),
        *(
            "messages",
            "|tojson",
            "|join",
            "|list",
            "|map('upper')",
            "|center(99999)",
            "[1:]",
            "(",
            ")",
            "[",
            "]",
            "%",
            "~",
        ),
        *(
            "{{ x }}",
            "{{ messages|join(ns.s) }}",
            "loop.index",
            "''.join",
            "'a' * 9999999",
            "{% generation %}",
            "é",
            "\n",
        ),
    ]
)


@given(fragments=st.lists(_fragments, min_size=1, max_size=12))
@settings(CHECKS, max_examples=200)
def test_any_chat_template(fragments: list[str]) -> None:
    messages = [{"role": "user", "content": "hi"}] * 3

    def render() -> None:
        ChatTemplate("".join(fragments), "t").render(messages, special_tokens={"bos_token": "<s>"})

    _opens_or_is_refused(render)


def _tokenizer_json() -> dict[str, Any]:
    vocabulary = {c: i for i, c in enumerate("abcĠ")} | {"ab": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+"), behavior="isolated")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, tokenizers.pre_tokenizers.ByteLevel()])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


TOKENIZER_JSON = _tokenizer_json()


def _write_tokenizer(folder: Path, place: tuple[Any, ...], value: Any) -> None:
    content = json.loads(json.dumps(TOKENIZER_JSON))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_a_panic_of_the_library_is_a_refusal(tmp_path: Path) -> None:
    """What the fuzz found: the post-processor names a token that it does not describe."""
    _write_tokenizer(tmp_path, ("post_processor", "special_tokens"), {})
    with pytest.raises(ModelRefused, match="the tokenizer does not work: no entry found for key"):
        load_tokenizer(tmp_path)


@given(place=st.sampled_from([p for p in _places(TOKENIZER_JSON) if p]), value=_json | _numbers)
@CHECKS
def test_tokenizer_json_with_other_values(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    _write_tokenizer(tmp_path, place, value)
    _opens_or_is_refused(lambda: load_tokenizer(tmp_path).encode("ab ba é <s>"))
