"""The user's own metric: it gates each candidate, its value is recorded, its failures are told by the user's lines."""

from __future__ import annotations

import json
import shutil

import pytest

from compiler.errors import SpecError
from compiler.goals import read_metric
from compiler.yaml_reader import node_from_plain
from tests.compiler.conftest import SPEC
from tests.serving import run_compile

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 3)
    def forward(self, x):
        return self.layer(x)
build = Model
"""
METRIC = """
import json
from pathlib import Path
import numpy as np

def right_answers(run, count=64):
    rng = np.random.default_rng(0)
    labels = np.load(Path(__file__).parent / "labels.npy")
    right = 0
    for start in range(0, count, 8):
        x = rng.normal(size=(8, 16)).astype(np.float32)
        right += int((run({"x": x})["y"].argmax(1) == labels[start : start + 8]).sum())
    return right / count

def distance(run):
    return float(np.abs(run({"x": np.ones((1, 16), np.float32)})["y"]).max())

def broken(run):
    return helper([1])

def helper(values):
    return values[3]

def text(run):
    return "very good"

def nan(run):
    return float("nan")

def library(run):
    return json.loads("{")

def wrong_input(run):
    return run({"x": np.ones((1, 15), np.float32)})["y"]
"""
RIGHT = "right_answers, files: [labels.npy], min: 0.9, args: {count: 32}"
GATED = SPEC + f"metric: {{function: metric_of_mine:{RIGHT}}}\n"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A model whose labels are its own answers, so that eager reaches 1, built once."""
    import numpy as np
    import torch

    folder = tmp_path_factory.mktemp("metric")
    (folder / "metric_model.py").write_text(MODEL)
    (folder / "metric_of_mine.py").write_text(METRIC)
    torch.manual_seed(0)
    layer, rng = torch.nn.Linear(16, 3), np.random.default_rng(0)
    inputs = [rng.normal(size=(8, 16)).astype(np.float32) for _ in range(8)]
    np.save(folder / "labels.npy", np.concatenate([layer(torch.from_numpy(x)).argmax(1).numpy() for x in inputs]))
    (folder / "spec.yaml").write_text(GATED.replace("FACTORY", "metric_model:build").lstrip())
    done = run_compile("build", folder / "spec.yaml", "-r", folder / "repo", "--json")
    assert done.returncode == 0, done.stderr
    (folder / "result.json").write_text(done.stdout)
    return folder


@pytest.fixture
def gated(template, tmp_path):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    spec = tmp_path / "spec.yaml"
    return spec, lambda *extra: run_compile("build", spec, "-r", tmp_path / "repo", *extra)


def test_the_value_of_eager_and_of_the_candidate_stand_in_the_manifest(template):
    [model] = json.loads((template / "result.json").read_text())["models"]
    assert model["manifest"]["metric"] == {
        "function": "metric_of_mine:right_answers",
        "value": 1.0,
        "eager": 1.0,
        "min": 0.9,
        "max": None,
    }
    assert [c["metric"] for c in model["manifest"]["candidates"]] == [1.0]
    assert "metric_of_mine.py" in model["manifest"]["code"]


def test_a_change_of_the_metric_or_of_its_data_builds_again(gated):
    import numpy as np

    spec, run = gated
    assert "up to date" in run().stdout
    path = spec.parent / "metric_of_mine.py"
    path.write_text(path.read_text() + "\nVALUE = 1\n")
    assert run().stdout.startswith("small version 2: built")
    labels = np.load(spec.parent / "labels.npy")
    np.save(spec.parent / "labels.npy", (labels + 1) % 3)
    done = run()
    assert done.returncode == 1
    assert "the model itself does not pass: metric metric_of_mine:right_answers is 0, below the 0.9" in done.stderr


def test_a_change_of_the_limit_loads_no_model(gated):
    spec, run = gated
    spec.write_text(spec.read_text().replace("min: 0.9", "min: 0.95"))
    done = run()
    assert done.stdout.startswith("small version 2: built") and done.stderr.count("  from the cache\n") == 3
    assert "    metric: 1\n" in done.stderr


def test_each_candidate_is_judged_and_one_that_fails_says_what_eager_reaches(gated):
    spec, run = gated
    text = spec.read_text().replace(RIGHT, "distance, max: 9")
    spec.write_text(text)
    eager = json.loads(run("--json").stdout)["models"][0]["manifest"]["metric"]["eager"]
    # Between the value of eager and that of int8, which rounds it up or down.
    int8 = json.loads(run("--json", "--precision", "int8_dynamic").stdout)["models"][0]["manifest"]["metric"]["value"]
    assert int8 != eager
    limit = f"{'max' if int8 > eager else 'min'}: {eager!r}"
    spec.write_text(text.replace("max: 9", limit))
    refused = run("--precision", "int8_dynamic")
    assert refused.returncode == 1 and "metric metric_of_mine:distance is " in refused.stderr
    assert f"(the eager model reaches {eager:g})" in refused.stderr


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "broken",
            "metric metric_of_mine:broken failed: IndexError: list index out of range\n"
            "  at metric_of_mine.py:19 in broken: return helper([1])\n"
            "  at metric_of_mine.py:22 in helper: return values[3]\n",
        ),
        (
            "library",
            "metric metric_of_mine:library failed: JSONDecodeError: Expecting property name enclosed in double quotes: "
            'line 1 column 2 (char 1)\n  at metric_of_mine.py:31 in library: return json.loads("{")',
        ),
        ("text", "metric metric_of_mine:text returned str, not a number"),
        ("nan", "metric metric_of_mine:nan returned nan; allowed: a finite number"),
        ("wrong_input", "metric metric_of_mine:wrong_input: the PyTorch model itself fails at a call of the metric"),
        ("right", "metric.function: metric_of_mine has no function 'right'; it has: Path, broken, "),
    ],
)
def test_what_is_wrong_with_the_function_is_told_by_its_lines(gated, function, message):
    spec, run = gated
    text = spec.read_text().replace(RIGHT, f"{function}, min: 0")
    spec.write_text(text)
    done = run()
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == (2 if function == "right" else 1)


def test_verify_runs_the_metric_of_a_spec_that_is_given(gated):
    import numpy as np

    spec, _ = gated
    repository = spec.parent / "repo"
    told = run_compile("verify", "small", "-r", repository)
    assert told.stdout.endswith(
        "metric metric_of_mine:right_answers was 1 when it was built; --spec FILE runs it again\n"
    )
    again = run_compile("verify", "small", "-r", repository, "--spec", spec)
    assert again.returncode == 0
    assert again.stdout.endswith("metric metric_of_mine:right_answers: 1, 1 of the eager model\n")
    np.save(spec.parent / "labels.npy", (np.load(spec.parent / "labels.npy") + 1) % 3)
    failed = run_compile("verify", "small", "-r", repository, "--spec", spec, "--json")
    assert failed.returncode == 1
    result = json.loads(failed.stdout)
    assert result["passed"] is False and result["metric"]["value"] == 0.0
    assert result["metric"]["problem"].startswith("metric metric_of_mine:right_answers is 0, below the 0.9")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"function": "m:f"}, "metric needs 'min' or 'max'"),
        ({"function": "m.f", "min": 1}, "metric.function is 'm.f'; allowed: 'package.module:function'"),
        ({"min": 1}, "metric lacks the key 'function'"),
        ({"function": "m:f", "min": "high"}, "metric.min must be a number, not 'high'"),
        ({"function": "m:f", "mim": 1}, "unknown key 'mim' in metric (did you mean 'min'?)"),
    ],
)
def test_a_wrong_key_is_told_with_its_line(metric, message):
    with pytest.raises(SpecError) as error:
        read_metric(node_from_plain(metric, "s.yaml"))
    assert error.value.message.startswith(f"s.yaml:1: {message}")
