from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.errors import SpecError
from compiler.triton_config import Step, TensorConfig, base_config, text_from_config
from compiler.yaml_reader import Node, read_yaml
from ensembles.graph import EnsembleSpec, Member, ensemble_from_node, read_member, wire
from tests.serving import run_compile, write_python_model


def _tensor(name: str, kind: str = "TYPE_FP32", dims: tuple[int, ...] = (-1,)) -> TensorConfig:
    return TensorConfig(name, kind, dims)


def _member(name: str, inputs: list[TensorConfig], outputs: list[TensorConfig], batch: int = 8, optional=()) -> Member:
    return Member(name, batch, {t.name: t for t in inputs}, {t.name: t for t in outputs}, frozenset(optional))


A = _member("A", [_tensor("x")], [_tensor("y")])
B = _member("B", [_tensor("a"), _tensor("b")], [_tensor("z")], batch=4)
MEMBERS = {"A": A, "B": B}
GOOD = EnsembleSpec(
    path=Path("e.yaml"),
    name="e",
    inputs=("in",),
    outputs=("out",),
    steps=(Step("A", {"x": "in"}, {"y": "mid"}), Step("B", {"a": "mid", "b": "in"}, {"z": "out"})),
    root=Node({}, "e.yaml", 1),
)


def _refusal(spec: EnsembleSpec, members=MEMBERS) -> str:
    with pytest.raises(SpecError) as error:
        wire(spec, members)
    return error.value.message.removeprefix("e.yaml: ensemble 'e': ")


def test_a_good_graph_takes_types_from_its_members_and_the_smallest_batch():
    wiring = wire(GOOD, MEMBERS)
    assert wiring.max_batch_size == 4
    assert wiring.inputs == (_tensor("in"),) and wiring.outputs == (_tensor("out"),)


def test_the_order_of_the_steps_does_not_matter():
    assert wire(replace(GOOD, steps=GOOD.steps[::-1]), MEMBERS).outputs == (_tensor("out"),)


def test_d02_a_member_input_that_is_not_mapped():
    steps = (GOOD.steps[0], Step("B", {"a": "mid"}, {"z": "out"}))
    assert _refusal(replace(GOOD, steps=steps)) == "model B input b is not mapped"


def test_d02_an_optional_input_may_be_left_out():
    steps = (GOOD.steps[0], Step("B", {"a": "mid"}, {"z": "out"}))
    members = {"A": A, "B": replace(B, optional_inputs=frozenset({"b"}))}
    assert wire(replace(GOOD, steps=steps), members)


def test_d02_an_ensemble_input_that_nothing_reads():
    assert _refusal(replace(GOOD, inputs=("in", "spare"))) == "input 'spare' is used by no step"


def test_d02_an_output_that_nothing_makes():
    assert _refusal(replace(GOOD, outputs=("out", "score"))).startswith("output 'score' is produced by no step")


def test_a_tensor_that_goes_nowhere():
    assert _refusal(replace(GOOD, outputs=("mid",))) == "tensor 'out' (B.z) goes nowhere"


def test_a_tensor_without_a_source_lists_those_there_are():
    steps = (GOOD.steps[0], Step("B", {"a": "mdi", "b": "in"}, {"z": "out"}))
    assert _refusal(replace(GOOD, steps=steps)) == (
        "tensor 'mdi' (read by B.a) has no source (did you mean 'mid'?); there are: in, mid, out"
    )


def test_a_name_that_the_member_does_not_have():
    steps = (Step("A", {"xx": "in"}, {"y": "mid"}), GOOD.steps[1])
    assert _refusal(replace(GOOD, steps=steps)).startswith("model A has no input 'xx' (did you mean 'x'?)")


def test_a_tensor_with_two_sources():
    steps = (GOOD.steps[0], Step("B", {"a": "mid", "b": "in"}, {"z": "mid"}))
    assert _refusal(replace(GOOD, steps=steps)) == "tensor 'mid' has two sources: A.y and B.z"


def test_d16_a_cycle_is_printed():
    steps = (Step("A", {"x": "back"}, {"y": "mid"}), Step("B", {"a": "mid", "b": "in"}, {"z": "back"}))
    assert _refusal(replace(GOOD, steps=steps, outputs=("back",))) == "the steps form a cycle: A -> B -> A"


def test_types_that_do_not_fit():
    members = {"A": replace(A, outputs={"y": _tensor("y", "TYPE_INT64")}), "B": B}
    assert _refusal(GOOD, members) == "tensor 'mid' is TYPE_INT64 in A.y and TYPE_FP32 in B.a"


@pytest.mark.parametrize(("have", "want"), [((3,), (4,)), ((3, 4), (-1,)), ((-1, 3), (-1, 4))])
def test_shapes_that_do_not_fit(have, want):
    members = {
        "A": replace(A, outputs={"y": _tensor("y", dims=have)}),
        "B": replace(B, inputs={"a": _tensor("a", dims=want), "b": _tensor("b")}),
    }
    assert _refusal(GOOD, members) == f"tensor 'mid' has the dims {list(have)} in A.y and {list(want)} in B.a"


def test_members_with_and_without_batching():
    assert "members with and without batching do not go together (max_batch_size: A 0, B 4)" in _refusal(
        GOOD, {"A": replace(A, max_batch_size=0), "B": B}
    )


def test_an_input_that_two_steps_read_must_be_one_type():
    members = {"A": A, "B": replace(B, inputs={"a": _tensor("a"), "b": _tensor("b", "TYPE_STRING")})}
    assert _refusal(GOOD, members) == "tensor 'in' is TYPE_FP32 in A.x and TYPE_STRING in B.b"


def test_a_member_is_read_from_its_config(tmp_path):
    from compiler.repository import Repository

    config = base_config("m", "python", 8, [_tensor("x", dims=(-1, 3))], [_tensor("y", "TYPE_STRING", (1,))])
    config.input[0].optional = True
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(text_from_config(config))
    assert read_member(Repository(tmp_path), "m") == _member(
        "m", [_tensor("x", dims=(-1, 3))], [_tensor("y", "TYPE_STRING", (1,))], optional={"x"}
    )
    assert read_member(Repository(tmp_path), "n") is None


ENSEMBLE = """\
name: pipe
inputs: [x]
outputs: [y]
steps:
  - {model: first, inputs: {x: x}, outputs: {y: middle}}
  - {model: second, inputs: {x: middle}, outputs: {y: y}}
"""


def test_the_spec_is_checked_by_line(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text(ENSEMBLE.replace("{model: second, inputs", "{model: second, input"))
    with pytest.raises(SpecError, match=r"e\.yaml:6: unknown key 'input' in a step \(did you mean 'inputs'\?\)"):
        ensemble_from_node(read_yaml(path), path)


def test_an_ensemble_is_built_from_hand_made_members_and_refused_without_them(tmp_path):
    repository = tmp_path / "repo"
    write_python_model(repository, "first")
    spec = tmp_path / "e.yaml"
    spec.write_text(ENSEMBLE)
    done = run_compile("build", spec, "-r", repository)
    assert done.returncode == 2
    assert "step 'second' is not in" in done.stderr and "it has: first" in done.stderr
    assert not (repository / "pipe").exists()
    write_python_model(repository, "second")
    assert run_compile("build", spec, "-r", repository).stdout.startswith("pipe version 1: built")
    assert run_compile("build", spec, "-r", repository).stdout.startswith("pipe version 1: up to date")
    # A member whose tensors changed makes the ensemble new.
    config = (repository / "first" / "config.pbtxt").read_text()
    (repository / "first" / "config.pbtxt").write_text(config.replace("max_batch_size: 4", "max_batch_size: 2"))
    assert run_compile("build", spec, "-r", repository).stdout.startswith("pipe version 2: built")
    assert "max_batch_size: 2" in (repository / "pipe" / "config.pbtxt").read_text()


def test_d05_an_optional_input_of_an_ensemble_is_refused_with_the_alternative(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text(ENSEMBLE.replace("inputs: [x]", "inputs: [x, {name: z, optional: true}]"))
    with pytest.raises(SpecError) as error:
        ensemble_from_node(read_yaml(path), path)
    assert str(error.value) == (
        f"{path}:2: an ensemble's input cannot be optional: Triton runs every step of it for every request\n"
        "  hint: make the choice inside one step with `source: {python: ...}`, or publish two ensembles"
    )
