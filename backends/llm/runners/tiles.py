"""How the paged attention kernel's work is cut. Without Triton, which not every machine has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_ROWS = 16  # a tile is never smaller: tl.dot needs 16 rows or more
_ROWS = 64


@dataclass(frozen=True)
class Tiles:
    """How the tokens of a step are cut into tiles; the same for all its layers.

    Attributes:
        requests: [num_tiles] int32, whose tokens they are.
        firsts: [num_tiles] int32, a tile's first token, counted from its request's first.
        query_begins: [num_requests + 1] int32, where each request's tokens start.
        block_q: tokens of a tile.
    """

    requests: torch.Tensor
    firsts: torch.Tensor
    query_begins: torch.Tensor
    block_q: int

    @classmethod
    def of(cls, query_begins: torch.Tensor, group: int, device: torch.device | str) -> Tiles:
        """Cuts requests of all lengths for one launch.

        Args:
            query_begins: [num_requests + 1] int32 on the CPU.
            group: query heads that share a key-value head.
        """
        lengths = query_begins[1:] - query_begins[:-1]
        # Decodes have one token each: a tile with more would compute rows that are thrown away.
        block_q = max(1, MIN_ROWS // group) if int(lengths.max()) == 1 else max(1, _ROWS // group)
        counts = (lengths + block_q - 1) // block_q
        requests = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
        before = torch.cumsum(counts, 0) - counts
        firsts = ((torch.arange(len(requests)) - before[requests.long()]) * block_q).to(torch.int32)
        return cls(requests.to(device), firsts.to(device), query_begins.to(device), block_q)
