"""The merges of a SentencePiece BPE model, which stores a score for each piece and no list of merges."""

from __future__ import annotations

from collections.abc import Mapping


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns pairs of pieces in the order in which they are merged: the pair that makes the best piece first.

    Args:
        scores: by piece; only pieces that merging may make or use.
    """
    merges = []
    for piece in sorted((p for p in scores if len(p) > 1), key=lambda p: -scores[p]):  # a stable order for equal ones
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((left, right))
    return merges
