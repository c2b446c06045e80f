"""What a user can choose of the runners for CPUs, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from backends.llm.runners.option_values import check_paths, take_flags, take_integers
from compiler.errors import UsageError

WeightFormat = Literal["u8_rows", "u4", "u8", "bf16", "f32", "stored"]
CachePrecision = Literal["auto", "u8"]


@dataclass(frozen=True)
class CpuOptions:
    """How the model is computed, and how much memory its KV cache gets.

    Attributes:
        kv_cache_bytes: memory for keys and values; the number of blocks follows from it.
        exact: float32 everywhere and no quantised activations, whatever the other options say; OpenVINO alone.
        weights: "u8_rows" is bytes with a scale for each row, the fastest, also of a bf16 model. OpenVINO alone has the
            others: "u4" and "u8" are forms of a file's codes for integer kernels (see forms.py), and leave other
            weights as they are; "bf16" and "f32" are the values themselves; "stored" is what the file has, float zero
            points and all: slower.
        kv_cache_precision: "auto" is what attention computes in: bf16 where the processor has it, f32 elsewhere and in
            exact mode; "u8" needs about half of bf16's memory; OpenVINO alone.
        batch_invariant: the same tokens give the same logits, to the bit, alone or in a batch, in chunks or whole,
            after a preemption or from the prefix cache. In OpenVINO prompts take longer (docs/measured.md); numba is
            so always.
        num_threads: 0 is the runner's own choice: numba's is one for each core that the process may run on,
            and for each 8 MiB of weights at most.
        cache_dir: where the built graph or the packed weights are kept, about as large as the model; it loads faster
            from there. None builds them each time.
        graph_dir: of a published version, which may carry them; it goes before `cache_dir`.
    """

    kv_cache_bytes: int = 1 << 30
    exact: bool = False
    batch_invariant: bool = False
    weights: WeightFormat = "u8_rows"
    kv_cache_precision: CachePrecision = "auto"
    num_threads: int = 0
    cache_dir: str | Path | None = None
    graph_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("weights", WeightFormat), ("kv_cache_precision", CachePrecision)):
            if getattr(self, name) not in get_args(kinds):
                allowed = ", ".join(get_args(kinds))
                raise UsageError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}")
        take_integers(
            self,
            {
                "num_threads": (0, "0 (the runner's choice) and more"),
                "kv_cache_bytes": (1, "a number of bytes, more than 0"),
            },
        )
        take_flags(self, ("exact", "batch_invariant"))
        check_paths(self, ("cache_dir", "graph_dir"))
