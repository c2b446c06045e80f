"""The product of rows of signed bytes with a matrix of unsigned bytes, in integers and exact up to its scales.

    out[m, n] = scale[n] * (sum over groups g of s[m, g] * (sum over i in g of x[m, i] * w[n, i]) - zero[n] * total[m])

with x the bytes of a row, s the scale of each group of 32 or 64 of them, w the matrix's bytes and total[m] the sum of
the row's values (s * x). A lane is one n, and each row's sums are taken in one order whatever rows are computed beside
it: a row has the same bits in every batch.

The matrix is packed for it: panels of 32 rows of w, and in a panel for each four columns the 32 rows' four bytes.
"""

from __future__ import annotations

from typing import Any

from backends.llm.runners.numba.compiling import inner
from backends.llm.runners.numba.packing import LANES, PANEL
from backends.llm.runners.numba.vectors import F32, FLOATS, I32, INTS, ZERO_INTS, ZEROS, Code, kernel

_VECTORS = PANEL // LANES
_STEPS = 4  # fours of columns in one turn of the innermost loop


def _tile(rows: int, panels: int) -> Any:
    """Returns the kernel for so many rows of x and panels of w; its sums stay in registers."""

    @kernel(12)
    def tile(
        c: Code, w: Any, w_panel: Any, x: Any, x_row: Any, s: Any, s_row: Any, groups: Any, turns: Any, out: Any,
        out_row: Any, factors: Any, totals: Any,
    ) -> None:  # fmt: skip
        """Addresses of the first panel, row, scale and so on, and the bytes from each to the next."""
        columns = [(panel, vector) for panel in range(panels) for vector in range(_VECTORS)]

        def group(index: Any, sums: list[Any]) -> list[Any]:
            def four_fours(step: Any, carried: list[Any]) -> list[Any]:
                *totals, w_at, x_at = carried
                for four in range(_STEPS):
                    weights = [
                        c.load(INTS, c.at(c.at(w_at, c.times(w_panel, p)), 4 * PANEL * four + 4 * LANES * v), 64)
                        for p, v in columns
                    ]
                    for row in range(rows):
                        inputs = c.splat(c.load(I32, c.at(c.at(x_at, c.times(x_row, row)), 4 * four)))
                        for column, weight in enumerate(weights):
                            place = row * len(columns) + column
                            totals[place] = c.dot_bytes(totals[place], weight, inputs)
                return [*totals, c.at(w_at, 4 * PANEL * _STEPS), c.at(x_at, 4 * _STEPS)]

            *floats, w_at, x_at = sums
            start = [ZERO_INTS] * (rows * len(columns))
            *counts, w_at, x_at = c.loop(turns, [*start, w_at, x_at], four_fours)
            for row in range(rows):
                scale = c.splat(c.load(F32, c.at(c.at(s, c.times(s_row, row)), c.times(index, 4))))
                for column in range(len(columns)):
                    place = row * len(columns) + column
                    count = c.b.sitofp(counts[place], FLOATS)
                    floats[place] = c.multiply_add(count, scale, floats[place])
            return [*floats, w_at, x_at]

        floats = c.loop(groups, [*[ZEROS] * (rows * len(columns)), w, x], group)
        for column in range(len(columns)):
            # Scale and zero point of the 16 columns stand one after the other.
            scale = c.load(FLOATS, c.at(factors, 8 * LANES * column), 64)
            zero = c.load(FLOATS, c.at(factors, 8 * LANES * column + 4 * LANES), 64)
            for row in range(rows):
                total = c.splat(c.load(F32, c.at(totals, 4 * row)))
                value = c.b.fsub(floats[row * len(columns) + column], c.b.fmul(zero, total))
                c.store(c.b.fmul(scale, value), c.at(c.at(out, c.times(out_row, row)), 4 * LANES * column))

    return tile


_one, _two, _three, _four = _tile(1, 2), _tile(2, 2), _tile(3, 2), _tile(4, 1)


@inner
def product(w, factors, columns, group, x, scales, totals, rows, first, last, out, out_row):  # type: ignore[no-untyped-def]
    """Computes all rows for pairs of panels `first` to `last`.

    Args:
        w, factors: addresses of the packed matrix and of its scales and zero points.
        columns, group: of w, and how many of them share a scale of x.
        x, scales, totals: addresses of [rows, columns] int8, [rows, columns / group] float32 and [rows] float32.
        out: address of float32; out_row is the bytes from a row to the next.
    """
    groups, turns = columns // group, group // (4 * _STEPS)
    w_panel, x_row, s_row = 32 * columns, columns, 4 * groups
    for pair in range(first, last):
        w_at, f_at, o_at = w + 2 * pair * w_panel, factors + 2 * pair * 32 * 8, out + 2 * pair * 32 * 4
        row = rows - rows % 4
        for panel in range(2):
            for four in range(0, row, 4):
                _four(
                    w_at + panel * w_panel, w_panel, x + four * x_row, x_row, scales + four * s_row, s_row,
                    groups, turns, o_at + four * out_row + panel * 128, out_row, f_at + panel * 256, totals + 4 * four,
                )  # fmt: skip
        x_at, s_at, t_at, o_at = x + row * x_row, scales + row * s_row, totals + 4 * row, o_at + row * out_row
        if rows - row == 1:
            _one(w_at, w_panel, x_at, x_row, s_at, s_row, groups, turns, o_at, out_row, f_at, t_at)
        elif rows - row == 2:
            _two(w_at, w_panel, x_at, x_row, s_at, s_row, groups, turns, o_at, out_row, f_at, t_at)
        elif rows - row == 3:
            _three(w_at, w_panel, x_at, x_row, s_at, s_row, groups, turns, o_at, out_row, f_at, t_at)
