"""Whether a draft token is accepted: the rule that leaves the distribution of the answer as it is without drafts. Pure.

With target probabilities p and a draft token drawn from q: accept it with min(1, p/q), else draw from max(p - q, 0),
renormalised (Leviathan et al. 2023, Chen et al. 2023). A token comes out with min(p, q) + max(p - q, 0) = p.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.llm.sampling.distribution import Distribution, draw


def verify_drawn(
    target: Distribution,
    draft_token_id: int,
    draft_probabilities: npt.NDArray[np.float32],
    accept_number: float,
    resample_number: float,
) -> tuple[int, bool]:
    """Judges a draft token that was drawn at random.

    Args:
        target: what the token would be drawn from without drafts.
        draft_token_id: the proposed token.
        draft_probabilities: [vocab_size], the very distribution that it was drawn from.
        accept_number: in [0, 1), unrelated to the draw of the draft.
        resample_number: in [0, 1), unrelated to both.

    Returns:
        The token, and whether it is the draft's.
    """
    if accept_number * float(draft_probabilities[draft_token_id]) < target.probability(draft_token_id):
        return draft_token_id, True
    p = target.weights / target.weights.sum(dtype=np.float64)
    residual = np.maximum(p - draft_probabilities[target.token_ids], 0).astype(np.float32)
    if not residual.any():  # p and q are the same but for rounding, and so are p and the residual's limit
        return draw(target, resample_number), False
    return draw(Distribution(target.token_ids, residual), resample_number), False


def verify_certain(target: Distribution, draft_token_id: int, number: float) -> tuple[int, bool]:
    """Judges a draft token that was not drawn but looked up: q is 1 there and 0 elsewhere.

    The token is drawn from the target, with the number that plain decoding would use, and compared. It is the draft's
    with probability p = min(1, p/q), and another one in proportion to max(p - q, 0): the rule above, and beyond it the
    very tokens that the same seed gives without drafts.

    Args:
        target: what the token would be drawn from without drafts.
        draft_token_id: the proposed token.
        number: in [0, 1), of this position.

    Returns:
        The token, and whether it is the draft's.
    """
    token_id = draw(target, number)
    return token_id, token_id == draft_token_id
