from __future__ import annotations

import numpy as np

from compiler.cases import export_sizes, larger_sizes, parity_cases
from compiler.spec import model_spec_from_file
from tests.compiler.test_spec import GOOD


def _spec(tmp_path, text=GOOD):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return model_spec_from_file(path)


def test_cases_reach_every_corner_and_stay_inside(tmp_path):
    spec = _spec(tmp_path)
    cases = parity_cases(spec)
    for name, dim in spec.dims.items():
        sizes = {c.sizes[name] for c in cases}
        assert {dim.min, dim.opt, dim.max} <= sizes
        assert all(dim.min <= s <= dim.max for s in sizes)
        assert any(s % 2 and dim.min < s < dim.max for s in sizes)
    assert len({c.name for c in cases}) == len(cases)
    for case in cases:
        assert case.inputs["ids"].shape == (case.sizes["batch"], case.sizes["length"])
        assert case.inputs["ids"].min() >= 0 and case.inputs["ids"].max() <= 99


def test_padded_masks_hold_a_full_row_and_a_row_with_one_token(tmp_path):
    padded = [c for c in parity_cases(_spec(tmp_path)) if "padded" in c.name and c.sizes["batch"] > 1]
    assert padded
    for case in padded:
        lengths = case.inputs["mask"].sum(axis=1)
        assert lengths[0] == case.sizes["length"] and lengths[-1] == 1
        # Ones, then zeros: never a hole.
        assert (np.diff(case.inputs["mask"], axis=1) <= 0).all()


def test_extreme_cases_hold_the_ends_of_the_range(tmp_path):
    cases = {c.name.split("[")[0]: c for c in parity_cases(_spec(tmp_path))}
    low, high = cases["extreme_low"].inputs["ids"], cases["extreme_high"].inputs["ids"]
    assert low.min() == 0 and low.max() <= 7 and high.max() == 99 and high.min() >= 92
    # Equal values everywhere would make ties of all scores and a variance of 0: no fault of a file shows there.
    assert len(np.unique(low)) > 3 and len(np.unique(high)) > 3


def test_extremes_of_every_kind_of_input_stay_in_its_range(tmp_path):
    kinds = {"float32": (-3, 5), "int8": (-128, 127), "uint8": (0, 255), "int64": (-(2**63), 2**63 - 1)}
    lines = [f"  - {{name: {k}_, dtype: {k}, shape: [batch, 16], range: [{a}, {b}]}}" for k, (a, b) in kinds.items()]
    text = "name: m\nsource: {factory: 'a:b'}\ndims:\n  batch: {max: 3}\ninputs:\n" + "\n".join(lines)
    cases = {c.name.split("[")[0]: c for c in parity_cases(_spec(tmp_path, text + "\noutputs: [{name: y}]\n"))}
    for kind, (low, high) in kinds.items():
        lowest, highest = (cases[f"extreme_{end}"].inputs[f"{kind}_"] for end in ("low", "high"))
        assert lowest.min() == low and highest.max() == high and lowest.max() < highest.min()


def test_cases_are_the_same_in_every_process(tmp_path):
    first, second = parity_cases(_spec(tmp_path)), parity_cases(_spec(tmp_path))
    for a, b in zip(first, second, strict=True):
        assert all((a.inputs[k] == b.inputs[k]).all() for k in a.inputs)


def test_export_sizes_are_distinct_and_above_1(tmp_path):
    assert export_sizes(_spec(tmp_path)) == {"batch": 3, "length": 4}


def test_export_sizes_avoid_fixed_axes(tmp_path):
    text = GOOD.replace("[batch, length], range", "[batch, length, 3], range")
    assert export_sizes(_spec(tmp_path, text)) == {"batch": 4, "length": 5}


def test_the_larger_sizes_to_trace_with_are_odd_and_distinct(tmp_path):
    spec = _spec(tmp_path)
    assert larger_sizes(spec) == {"batch": 31, "length": 63}
