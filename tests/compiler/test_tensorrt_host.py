"""c14: an engine against the machine that is to run it. Hosts are data; nothing here needs a GPU."""

from __future__ import annotations

import pytest

from compiler.engine_host import EngineHost, Gpu, engine_problems, gpus_from_csv

FACTS = {
    "library": "tensorrt",
    "library_version": "10.3.0",
    "compute_capabilities": ["8.6"],
    "builder": {"hardware_compatibility": "none", "version_compatible": False},
}
A10 = Gpu("NVIDIA A10", "8.6")
T4 = Gpu("Tesla T4", "7.5")
H100 = Gpu("NVIDIA H100", "9.0")


def _with(**builder):
    return {**FACTS, "builder": {**FACTS["builder"], **builder}}


def test_the_machine_that_built_it_has_no_problem():
    assert engine_problems(FACTS, EngineHost((A10,), {"tensorrt": "10.3.0"})) == []


def test_c14_another_gpu_and_version_are_refused_with_both_values():
    assert engine_problems(FACTS, EngineHost((T4,), {"tensorrt": "11.4.0"})) == [
        "the engine was built for compute capability 8.6, and this machine's Tesla T4 has 7.5; "
        "build it again on this machine",
        "the engine was built with tensorrt 10.3.0, and this machine has 11.4.0; build it again with that version",
    ]


def test_c14_every_gpu_of_the_machine_counts():
    """KIND_GPU puts an instance on each of them."""
    assert len(engine_problems(FACTS, EngineHost((A10, T4, T4), {"tensorrt": "10.3.0"}))) == 1


def test_c14_a_version_that_is_not_known_is_not_compared():
    """A Triton image carries the library without a Python package."""
    assert engine_problems(FACTS, EngineHost((A10,))) == []


@pytest.mark.parametrize(
    ("level", "gpu", "fits"),
    [
        ("none", H100, False),
        ("ampere_plus", H100, True),
        ("ampere_plus", T4, False),
        ("same_compute_capability", A10, True),
        ("same_compute_capability", H100, False),
    ],
)
def test_c14_hardware_compatibility_widens_what_fits(level, gpu, fits):
    problems = engine_problems(_with(hardware_compatibility=level), EngineHost((gpu,), {"tensorrt": "10.3.0"}))
    assert (problems == []) is fits


@pytest.mark.parametrize(("here", "fits"), [("10.3.0", True), ("10.16.1", True), ("10.2.9", False), ("11.0.0", False)])
def test_c14_version_compatible_reaches_newer_ones_of_the_same_major(here, fits):
    problems = engine_problems(_with(version_compatible=True), EngineHost((A10,), {"tensorrt": here}))
    assert (problems == []) is fits


def test_without_a_gpu_the_target_to_use_is_named():
    assert engine_problems(FACTS, EngineHost()) == [
        "is a tensorrt engine for compute capability 8.6, and this machine has no NVIDIA GPU; build it with "
        "target: onnxruntime to serve it here"
    ]


@pytest.mark.parametrize("facts", [{}, {"compute_capabilities": 8.6}, {"builder": 1, "compute_capabilities": [None]}])
def test_facts_that_are_garbage_are_a_problem_and_no_crash(facts):
    assert engine_problems(facts, EngineHost((A10,)))


def test_the_drivers_list_is_read():
    assert gpus_from_csv("NVIDIA A10, 8.6\nTesla T4, 7.5\n\n") == (A10, T4)
    # An old driver does not know the query's column.
    assert gpus_from_csv("Tesla K80, [N/A]\n") == (Gpu("Tesla K80", ""),)
