"""What a user can choose of the OpenVINO runner, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from compiler.errors import UsageError

WeightFormat = Literal["stored", "u8", "bf16", "f32"]
CachePrecision = Literal["auto", "u8", "bf16", "f16", "f32"]


@dataclass(frozen=True)
class OpenVinoOptions:
    """How the model is computed, and how much memory its KV cache gets.

    Attributes:
        kv_cache_bytes: memory for keys and values; the number of blocks follows from it.
        exact: float32 everywhere and no quantised activations, whatever the other options say.
        weights: "stored" keeps what the file has, to the bit; "u8" widens 4-bit codes whose zero points are no whole
            numbers, which the integer kernels need; "bf16" and "f32" are the values themselves.
        kv_cache_precision: "auto" is bf16 where the processor computes in it, else f32.
        num_threads: 0 is OpenVINO's own choice.
    """

    kv_cache_bytes: int = 1 << 30
    exact: bool = False
    weights: WeightFormat = "u8"
    kv_cache_precision: CachePrecision = "auto"
    num_threads: int = 0

    def __post_init__(self) -> None:
        for name, kinds in (("weights", WeightFormat), ("kv_cache_precision", CachePrecision)):
            if getattr(self, name) not in get_args(kinds):
                allowed = ", ".join(get_args(kinds))
                raise UsageError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")
        if self.num_threads < 0:
            raise UsageError(f"num_threads is {self.num_threads}; allowed: 0 (OpenVINO's choice) and more")
        if self.kv_cache_bytes <= 0:
            raise UsageError(f"kv_cache_bytes is {self.kv_cache_bytes}; allowed: more than 0")
