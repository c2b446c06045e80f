"""Small GGUF files, right ones and wrong ones, written byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Returns a metadata value with its type; integers are uint32, floats float32."""
    if isinstance(item, bytes):  # already a value
        return item
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(string(s) for s in item)
    if isinstance(item[0], float):
        return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
    return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)


@dataclass(frozen=True)
class Tensor:
    """A tensor as the file has it: dims with columns first."""

    name: str
    dims: Sequence[int]
    data: bytes
    type_id: int = 0
    offset: int | None = None  # None: after the one before


@dataclass(frozen=True)
class GgufBytes:
    """A file to be written."""

    metadata: dict[str, Any]
    tensors: list[Tensor]
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    num_tensors: int | None = None
    num_pairs: int | None = None
    more_pairs: list[tuple[str, Any]] = field(default_factory=list)

    def with_tensor(self, name: str, /, **changes: Any) -> GgufBytes:
        return replace(self, tensors=[replace(t, **changes) if t.name == name else t for t in self.tensors])

    def without_tensor(self, name: str) -> GgufBytes:
        return replace(self, tensors=[t for t in self.tensors if t.name != name])

    def with_metadata(self, **changes: Any) -> GgufBytes:
        """Keys are written with '__' for '.'; None removes one."""
        merged = self.metadata | {k.replace("__", "."): v for k, v in changes.items()}
        return replace(self, metadata={k: v for k, v in merged.items() if v is not None})

    def to_bytes(self) -> bytes:
        pairs = [*self.metadata.items(), *self.more_pairs]
        count = len(self.tensors) if self.num_tensors is None else self.num_tensors
        head = self.magic + struct.pack(
            "<IQQ", self.version, count, len(pairs) if self.num_pairs is None else self.num_pairs
        )
        head += b"".join(string(key) + value(item) for key, item in pairs)
        data = b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            head += string(tensor.name) + struct.pack("<I", len(tensor.dims))
            head += b"".join(struct.pack("<Q", d) for d in tensor.dims)
            head += struct.pack("<IQ", tensor.type_id, offset)
            data += tensor.data + b"\0" * (-len(tensor.data) % self.alignment)
        return head + b"\0" * (-len(head) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def tensor(name: str, array: Array) -> Tensor:
    return Tensor(name, tuple(reversed(array.shape)), array.astype("<f4").tobytes())


HIDDEN, HEADS, KV_HEADS, LAYERS, INNER, VOCAB = 64, 4, 2, 2, 96, 80


def tiny(arch: str = "llama", *, tied: bool = True, head_dim: int = 16, seed: int = 0) -> GgufBytes:
    """A model with random float32 weights; 2 layers, 4 heads, 2 of them with keys, hidden size 64."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> Tensor:
        return tensor(name, rng.standard_normal(shape).astype(np.float32) * 0.2)

    queries, keys = HEADS * head_dim, KV_HEADS * head_dim
    tensors = [weight("token_embd.weight", VOCAB, HIDDEN), weight("output_norm.weight", HIDDEN)]
    if not tied:
        tensors.append(weight("output.weight", VOCAB, HIDDEN))
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (queries, HIDDEN),
            "attn_k.weight": (keys, HIDDEN),
            "attn_v.weight": (keys, HIDDEN),
            "attn_output.weight": (HIDDEN, queries),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if arch in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        if arch == "gemma3":
            layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        tensors += [weight(f"blk.{i}.{name}", *shape) for name, shape in layer.items()]
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
    }
    if arch == "gemma3":
        metadata["gemma3.attention.sliding_window"] = 16
    return GgufBytes(metadata, tensors)


def tiny_with_text(context_length: int = 128) -> GgufBytes:
    """A tiny llama with a tokenizer: a token for each of some characters, so that it can be served."""
    characters = [*ascii_letters, *digits, *"Ġ.,:;!?-_'()/"]
    tokens = ["ab", *characters]
    tokens += [f"<{number}>" for number in range(VOCAB - len(tokens))]
    return tiny().with_metadata(
        llama__context_length=context_length,
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="smollm",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[1] * (VOCAB - 1) + [3],
        tokenizer__ggml__merges=["a b"],
        tokenizer__ggml__eos_token_id=VOCAB - 1,
    )
