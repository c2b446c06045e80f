"""Optimization profiles from a spec, exact, and their agreement with Triton's batch."""

from __future__ import annotations

import pytest

from compiler.errors import ModelRefused
from compiler.targets.tensorrt_profiles import (
    InputProfile,
    batch_problems,
    check_network_shapes,
    profiles_from_spec,
    refuse_batch_problems,
)
from tests.compiler.tensorrt_models import spec_from

SPEC = """\
name: encoder
source: {factory: nothing:build}
target: tensorrt-rtx
dims:
  batch: {opt: 8, max: 32}
  length: {min: 2, opt: 64, max: 256}
inputs:
  - {name: ids, dtype: int64, shape: [batch, length], range: [0, 9]}
  - {name: unused, dtype: float32, shape: [batch, 3]}
  - {name: image, dtype: float32, shape: [batch, 3, length, 7]}
outputs:
  - {name: y}
"""


def test_shapes_are_those_of_the_dims(tmp_path):
    assert profiles_from_spec(spec_from(tmp_path, SPEC), ["image", "ids"]) == (
        InputProfile("ids", (1, 2), (8, 64), (32, 256)),
        InputProfile("image", (1, 3, 2, 7), (8, 3, 64, 7), (32, 3, 256, 7)),
    )


def test_a_model_without_dims_has_one_shape(tmp_path):
    text = (
        "name: a\nsource: {factory: a:b}\ninputs:\n  - {name: x, dtype: float32, shape: [1, 3]}\noutputs: [{name: y}]"
    )
    assert profiles_from_spec(spec_from(tmp_path, text), ["x"]) == (InputProfile("x", (1, 3), (1, 3), (1, 3)),)


def test_c12_one_profile_covers_every_batch_from_one_to_the_largest(tmp_path):
    """Profiles 1..1, 2..8, 9..32 would refuse what falls between after a change; one has no holes."""
    profiles = profiles_from_spec(spec_from(tmp_path, SPEC), ["ids"])
    assert [(p.min[0], p.max[0]) for p in profiles] == [(1, 32)]
    assert all(profiles[0].min[0] <= batch <= profiles[0].max[0] for batch in (1, 8, 9, 31, 32))


def test_c12_a_profile_that_starts_above_one_is_a_problem():
    assert batch_problems({"x": {"min": [8], "max": [32]}}, 32) == [
        "the engine's profile for 'x' starts at batch 8; it must start at 1"
    ]


def test_c10_max_batch_size_is_the_end_of_the_profile():
    profile = {"x": {"min": [1, 3], "opt": [1, 3], "max": [1, 3]}}
    assert batch_problems(profile, 1) == []
    assert batch_problems(profile, 32) == ["max_batch_size is 32, and the engine's profile for 'x' ends at batch 1"]
    with pytest.raises(ModelRefused, match=r"max_batch_size is 32, .* ends at batch 1\n  hint: .*dims.batch"):
        refuse_batch_problems(profile, 32)


def test_without_batching_every_axis_is_the_models_own():
    assert batch_problems({"x": {"min": [4], "max": [4]}}, 0) == []


@pytest.mark.parametrize("shapes", [None, 3, {}, {"min": [], "max": []}, {"min": ["a"], "max": [1]}, []])
def test_a_profile_that_is_garbage_is_a_problem_and_no_crash(shapes):
    assert batch_problems({"x": shapes}, 8) == [
        "the engine's profile for 'x' in the manifest is not one that `compile build` wrote"
    ]


def test_c10_a_network_that_fixed_the_batch_is_refused():
    profile = InputProfile("x", (1, 3), (4, 3), (8, 3))
    check_network_shapes([profile], {"x": [-1, 3]})
    with pytest.raises(ModelRefused, match=r"'x' is \[1, 3\] in the network: axis 0 is fixed to 1, .* from 1 to 8"):
        check_network_shapes([profile], {"x": [1, 3]})
