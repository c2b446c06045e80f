"""Is the model fit to be an oracle? Two runs must agree, and a row's answer must not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from compiler.cases import Case
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused, one_of
from compiler.spec import ModelSpec
from compiler.tensors import BATCH_DIM

Outputs = Mapping[str, AnyArray]

# Far above what another order of summing changes, far below what another row or a random number does.
ALLOWED_CHANGE = 1e-2
ALLOWED_SHARE = 0.1


def check_repeatable(case: Case, first: Outputs, again: Outputs, changed: tuple[str, ...]) -> None:
    """Compares two runs of the model on the same inputs, with other calls between them.

    Args:
        changed: the buffers that the calls have changed.

    Raises:
        ModelRefused: the answers differ: no file can be proved equal to that.
    """
    for name, want in first.items():
        if _is_other(want, again[name], np.abs(want.astype(np.float64)).max(initial=0.0)):
            why = "it draws random numbers, or keeps something between calls"
            if changed:
                why = f"forward changes its state: {one_of(changed)}"
            raise ModelRefused(
                f"the model answers the same inputs differently the second time ({case.name}, output '{name}'): {why}",
                hint="a served file has no state and no dice: pass state in as an input and out as an output; leave "
                "out dropout with training=True, torch.rand and torch.multinomial, or pass what they draw as an input",
            )


def check_rows(spec: ModelSpec, reference: Callable[[Case], Outputs], case: Case, outputs: Outputs) -> None:
    """Runs the first and the last row alone: Triton puts rows of different callers into one batch.

    Raises:
        ModelRefused: a row's answer depends on its neighbours.
    """
    rows = case.sizes.get(BATCH_DIM, 1) if spec.max_batch_size else 1
    for row in (0, rows - 1) if rows > 1 else ():
        inputs = {name: array[row : row + 1] for name, array in case.inputs.items()}
        alone = reference(Case(f"row {row} of {case.name}", {**case.sizes, BATCH_DIM: 1}, inputs))
        for name, together in outputs.items():
            want = together[row : row + 1] if together.ndim and together.shape[0] == rows else None
            # Another shape is told by check_output_shapes, after the export has named the line.
            if want is None or want.shape != alone[name].shape:
                continue
            if _is_other(want, alone[name], np.abs(together.astype(np.float64)).max(initial=0.0)):
                raise ModelRefused(
                    f"output '{name}' of row {row} is another one when the row is sent alone than in a batch of "
                    f"{rows}: rows depend on each other",
                    hint="Triton puts requests of different callers into one batch. Reduce and normalise along other "
                    f"axes than the first, or give the dim another name than '{BATCH_DIM}' to serve without batching",
                )


def _is_other(want: AnyArray, got: AnyArray, scale: float) -> bool:
    """Whether two answers differ by more than rounding."""
    if want.shape != got.shape:
        return True
    if want.size == 0:
        return False
    if want.dtype.kind != "f":
        return float(np.mean(want != got)) > ALLOWED_SHARE
    difference = np.linalg.norm((want.astype(np.float64) - got.astype(np.float64)).ravel())
    size = np.linalg.norm(want.astype(np.float64).ravel())
    return bool(difference > ALLOWED_CHANGE * size + 1e-6 * scale * np.sqrt(want.size))
