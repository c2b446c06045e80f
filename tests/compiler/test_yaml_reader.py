from __future__ import annotations

from pathlib import Path

import pytest

from compiler.errors import SpecError
from compiler.yaml_reader import MAX_NODES, read_yaml


def _read(tmp_path: Path, text: str):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return read_yaml(path)


def test_values_keep_the_line_of_their_key(tmp_path):
    root = _read(tmp_path, "a: 1\nb:\n  c:\n    - x\n    - y\n")
    assert root.value["a"].line == 1
    assert root.value["b"].value["c"].line == 3
    assert [n.line for n in root.value["b"].value["c"].value] == [4, 5]
    assert root.plain() == {"a": 1, "b": {"c": ["x", "y"]}}


def test_unknown_key_names_line_allowed_and_the_closest(tmp_path):
    root = _read(tmp_path, "name: a\nimputs: []\n")
    with pytest.raises(SpecError) as error:
        root.table("the spec", required=("name", "inputs"))
    assert str(error.value) == (
        f"{tmp_path}/a.yaml:2: unknown key 'imputs' in the spec (did you mean 'inputs'?); allowed: inputs, name"
    )


def test_missing_key(tmp_path):
    with pytest.raises(SpecError, match=r"a\.yaml:1: the spec lacks the key 'inputs'; required: inputs, name"):
        _read(tmp_path, "name: a\n").table("the spec", required=("name", "inputs"))


def test_key_given_twice(tmp_path):
    with pytest.raises(SpecError, match=r"a\.yaml:3: the key 'a' stands twice \(first in line 1\)"):
        _read(tmp_path, "a: 1\nb: 2\na: 3\n")


def test_broken_yaml_names_the_line(tmp_path):
    with pytest.raises(SpecError, match=r"a\.yaml:2: not valid YAML"):
        _read(tmp_path, "a: 1\nb: }\n")


def test_tags_that_would_build_objects_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r":1: a value of the type 'python/object/apply:os.system'"):
        _read(tmp_path, "a: !!python/object/apply:os.system ['touch /tmp/x']\n")


def test_alias_bomb_is_refused(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 9)]
    with pytest.raises(SpecError, match=f"more than {MAX_NODES} values"):
        _read(tmp_path, "\n".join(levels))


def test_recursive_alias_is_refused(tmp_path):
    with pytest.raises(SpecError):
        _read(tmp_path, "a: &a [*a]\n")


def test_missing_file_lists_the_specs_there(tmp_path):
    (tmp_path / "encoder.yaml").write_text("name: a\n")
    with pytest.raises(SpecError, match=r"no such file\n  hint: specs in .*: encoder\.yaml"):
        read_yaml(tmp_path / "encodr.yaml")


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("0.5", 0.5), ("3", 3.0)])
def test_numbers_as_people_write_them(tmp_path, text, value):
    assert _read(tmp_path, f"a: {text}\n").value["a"].number("a") == value


@pytest.mark.parametrize("text", [".inf", ".nan", "true", "[1]", "abc", "~"])
def test_what_is_no_finite_number(tmp_path, text):
    with pytest.raises(SpecError, match=r"a must be a finite number|a must be a number"):
        _read(tmp_path, f"a: {text}\n").value["a"].number("a")
