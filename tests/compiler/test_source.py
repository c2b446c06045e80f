from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compiler.errors import EnvironmentLacks, ModelRefused, SpecError
from compiler.files import resolve_file
from compiler.sources.code import code_sha256, factory_code
from compiler.sources.factory import load_module
from compiler.spec import model_spec_from_file
from compiler.yaml_reader import Node
from tests.compiler.conftest import SPEC
from tests.serving import run_compile

LINEAR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 3)
    def forward(self, x):
        return self.layer(x)
build = Model
"""
WEIGHTED = SPEC.replace("{factory: FACTORY}", "{factory: FACTORY, weights: WEIGHTS}")


def _load(path: Path):
    return load_module(model_spec_from_file(path))


def _weighted(project, tmp_path: Path, name: str, state: dict[str, torch.Tensor], extra: str = "") -> Path:
    if name.endswith(".safetensors"):
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name)
    return project(LINEAR, WEIGHTED.replace("WEIGHTS", name + extra))


STATE = {"layer.weight": torch.ones(3, 16), "layer.bias": torch.zeros(3)}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_are_loaded_into_the_module(project, tmp_path, name):
    module = _load(_weighted(project, tmp_path, name, STATE))
    assert torch.equal(module(torch.ones(1, 16)), torch.full((1, 3), 16.0))
    assert not module.training


def test_a_missing_weight_file_names_line_and_place(project, tmp_path):
    path = project(LINEAR, WEIGHTED.replace("WEIGHTS", "weights/model.safetensors"))
    with pytest.raises(SpecError) as error:
        _load(path)
    assert str(error.value) == (
        f"{path}:2: no such file: weights/model.safetensors\n  hint: looked for {tmp_path}/weights/model.safetensors"
    )


def test_a_missing_package_names_the_command():
    node = Node("package:no_such_package/a.bin", "spec.yaml", 3)
    with pytest.raises(EnvironmentLacks) as error:
        resolve_file(node, node.value, Path())
    assert str(error.value) == (
        "spec.yaml:3: the package 'no_such_package' is not installed\n  hint: pip install --no-deps no-such-package"
    )


@pytest.mark.parametrize("reference", ["package:numpy/../../x", "package:numpy", "package:numpy//etc/passwd"])
def test_a_package_path_cannot_leave_its_package(reference):
    with pytest.raises(SpecError):
        resolve_file(Node(reference, "spec.yaml", 3), reference, Path())


def test_finding_a_package_file_does_not_import_the_package(tmp_path, monkeypatch):
    (tmp_path / "bait").mkdir()
    (tmp_path / "bait" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "bait" / "w.bin").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = resolve_file(Node("", "spec.yaml", 1), "package:bait/w.bin", Path())
    assert found == tmp_path / "bait" / "w.bin" and "bait" not in sys.modules


def test_weights_that_do_not_fit_are_listed_by_name(project, tmp_path):
    state = {"layer.weight": torch.ones(4, 16), "head.weight": torch.zeros(3)}
    with pytest.raises(ModelRefused) as error:
        _load(_weighted(project, tmp_path, "w.safetensors", state))
    message = str(error.value)
    assert "missing from the file: layer.bias" in message
    assert "not in the module: head.weight" in message
    assert "layer.weight is [4, 16] in the file and [3, 16] in the module" in message


def test_weights_can_be_left_out_by_name(project, tmp_path):
    state = {**STATE, "head.weight": torch.zeros(3)}
    _load(_weighted(project, tmp_path, "w.safetensors", state, ", ignore_weights: ['head.*']"))


def test_an_ignore_that_matches_nothing_is_an_error(project, tmp_path):
    with pytest.raises(SpecError, match=r"no weight matches 'heads\.\*'"):
        _load(_weighted(project, tmp_path, "w.safetensors", STATE, ", ignore_weights: ['heads.*']"))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["w.pt", "w.bin", "w.pth"])
def test_i01_i02_a_pickle_that_runs_code_is_refused_with_no_fall_back(project, tmp_path, name):
    target = tmp_path / "created"
    torch.save({"layer.weight": Bomb(target)}, tmp_path / name)
    with pytest.raises(ModelRefused, match=r"was refused: it is damaged or holds code"):
        _load(project(LINEAR, WEIGHTED.replace("WEIGHTS", name)))
    assert not target.exists()


def test_i01_a_bare_pickle_is_refused_too(project, tmp_path):
    target = tmp_path / "created"
    (tmp_path / "w.bin").write_bytes(pickle.dumps(Bomb(target)))
    with pytest.raises(ModelRefused):
        _load(project(LINEAR, WEIGHTED.replace("WEIGHTS", "w.bin")))
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 8 + b"{}", (10**15).to_bytes(8, "little") + b"{}"])
def test_a_damaged_safetensors_file_is_refused(project, tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ModelRefused, match="not a valid safetensors file"):
        _load(project(LINEAR, WEIGHTED.replace("WEIGHTS", "w.safetensors")))


def test_a_factory_that_is_not_there(project):
    path = project(LINEAR, function="biuld")
    with pytest.raises(SpecError, match=r":2: source.factory: .* has no function 'biuld'; it has: Model, build"):
        _load(path)


def test_a_module_that_is_not_there(project, tmp_path):
    path = project(LINEAR)
    path.write_text(path.read_text().replace("factory: model_", "factory: no_model_"))
    with pytest.raises(SpecError, match=r":2: source.factory: no module named 'no_model_"):
        _load(path)


def test_a_package_that_the_factory_needs(project):
    with pytest.raises(
        EnvironmentLacks, match=r"needs the package 'no_such_dependency'.*\n  hint: pip install no_such"
    ):
        _load(project("import no_such_dependency\n" + LINEAR))


def test_a_factory_that_raises_is_named_by_line(project):
    code = "def build():\n    sizes = [1]\n    return sizes[3]\n"
    with pytest.raises(ModelRefused, match=r"IndexError: list index out of range \(at .*\.py:6: return sizes\[3\]\)"):
        _load(project(code))


def test_a_factory_that_returns_something_else(project):
    with pytest.raises(ModelRefused, match=r"returned dict, not a torch\.nn\.Module"):
        _load(project("def build():\n    return {}\n"))


def test_the_code_behind_a_factory_is_its_module_and_what_that_imports(tmp_path, monkeypatch):
    (tmp_path / "mk_pkg").mkdir()
    (tmp_path / "mk_pkg" / "__init__.py").write_text("")
    (tmp_path / "mk_pkg" / "model.py").write_text("import os\nimport torch\nfrom . import layers\n\ndef build(): ...\n")
    (tmp_path / "mk_pkg" / "layers.py").write_text("from mk_helper import value\n")
    (tmp_path / "mk_helper.py").write_text("value = 1\n")
    (tmp_path / "mk_unrelated.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    for name in ("mk_unrelated", "mk_pkg.model"):
        importlib.import_module(name)
    try:
        code = factory_code("mk_pkg.model:build")
        files = {"mk_pkg/__init__.py", "mk_pkg/model.py", "mk_pkg/layers.py", "mk_helper.py"}
        assert set(code) == {*files, "package:torch"}
        assert (
            code["package:torch"] == torch.__version__.partition("+")[0] or code["package:torch"] == torch.__version__
        )
        # A later build finds and hashes the same files without importing any of them.
        assert {path: code_sha256(path, tmp_path) for path in code} == code
        (tmp_path / "mk_helper.py").write_text("value = 2\n")
        assert code_sha256("mk_helper.py", tmp_path) != code["mk_helper.py"]
        os.remove(tmp_path / "mk_helper.py")
        assert code_sha256("mk_helper.py", tmp_path) is None
    finally:
        for name in [n for n in sys.modules if n.startswith("mk_")]:
            del sys.modules[name]


@pytest.mark.parametrize(
    "path",
    [
        "os.path/x.py",
        "package:no-such-package",
        "package:",
        "../../etc/passwd",
        "json/../../../etc/passwd",
        "",
        "/etc/passwd",
    ],
)
def test_a_path_from_a_manifest_is_looked_up_by_plain_names_only(path, tmp_path):
    assert code_sha256(path, tmp_path) is None


def test_i02_trust_pickle_opens_what_weights_only_refuses_and_it_is_recorded(project, tmp_path):
    created = tmp_path / "created"
    torch.save({**STATE, "layer.extra": Bomb(created)}, tmp_path / "w.pt")
    spec = project(LINEAR, WEIGHTED.replace("WEIGHTS", "w.pt"))
    refused = run_compile("build", spec, "-r", tmp_path / "repo")
    assert refused.returncode == 1 and not created.exists()
    assert refused.stderr.startswith("error: source.weights w.pt was refused: it is damaged or holds code")
    assert "`compile build --trust-pickle` runs its code, and is for files that you wrote yourself" in refused.stderr
    # The flag does what it says, and no more: the content must still be named tensors.
    trusted = run_compile("build", spec, "-r", tmp_path / "repo", "--trust-pickle")
    assert created.exists() and trusted.returncode == 1
    assert "source.weights w.pt holds dict, not a mapping from names to tensors" in trusted.stderr


def test_a_whole_module_in_a_pickle_is_its_weights_where_it_is_trusted(project, tmp_path):
    torch.save(torch.nn.ModuleDict({"layer": torch.nn.Linear(16, 3)}), tmp_path / "w.pt")
    spec = project(LINEAR, WEIGHTED.replace("WEIGHTS", "w.pt"))
    done = run_compile("build", spec, "-r", tmp_path / "repo", "--trust-pickle")
    assert done.returncode == 0, done.stderr
    assert "warning: w.pt was opened with --trust-pickle: whoever wrote it could run code" in done.stderr
    manifest = json.loads((tmp_path / "repo" / "small" / "1" / "manifest.json").read_text())
    assert manifest["source"]["trusted"] == ["w.pt"]
    assert manifest["command"] == "compile build spec.yaml --trust-pickle"


def test_trust_that_was_not_needed_is_not_recorded(project, tmp_path):
    spec = _weighted(project, tmp_path, "w.pt", STATE)
    done = run_compile("build", spec, "-r", tmp_path / "repo", "--trust-pickle", "--json")
    manifest = json.loads(done.stdout)["models"][0]["manifest"]
    assert manifest["source"]["trusted"] == [] and manifest["command"] == "compile build spec.yaml"
    assert "warning" not in done.stderr


def test_i03_weights_only_is_no_sandbox_and_the_report_says_so(project, tmp_path):
    """Whatever its unpickler lets through, a pickle that was opened is told; safetensors need no such note."""
    from compiler.sources import open_source

    pickled = open_source(model_spec_from_file(_weighted(project, tmp_path, "w.pt", STATE)))
    assert pickled.notes == (
        "note: w.pt is a pickle; weights_only, with which it was opened, is no sandbox: prefer .safetensors",
    )
    assert open_source(model_spec_from_file(_weighted(project, tmp_path, "w.safetensors", STATE))).notes == ()


def test_i03_a_torch_whose_weights_only_can_be_left_is_not_used(project, tmp_path, monkeypatch):
    spec = _weighted(project, tmp_path, "w.pt", STATE)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(EnvironmentLacks, match=r"torch 2\.9\.1\+cpu cannot open it safely \(2\.10 can\)"):
        _load(spec)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_names_that_a_wrapper_gave_are_the_module_s_own(project, tmp_path, prefix):
    """What DataParallel or torch.compile saved."""
    module = _load(_weighted(project, tmp_path, "w.safetensors", {f"{prefix}{k}": v for k, v in STATE.items()}))
    assert torch.equal(module.layer.weight, STATE["layer.weight"])


TIED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        if TIE:
            self.head.weight = self.embed.weight
    def forward(self, x):
        return self.head(self.embed(x))
build = Model
"""


def test_j07_a_head_that_is_tied_is_shared_and_one_that_is_not_is_refused(project, tmp_path):
    save_file({"embed.weight": torch.arange(20.0).reshape(5, 4)}, tmp_path / "w.safetensors")
    spec = WEIGHTED.replace("WEIGHTS", "w.safetensors")
    module = _load(project(TIED.replace("TIE", "True"), spec))
    assert torch.equal(module.head.weight, torch.arange(20.0).reshape(5, 4))
    assert module.head.weight is module.embed.weight
    sys.modules.pop(type(module).__module__)
    with pytest.raises(ModelRefused, match=r"missing from the file: head\.weight"):
        _load(project(TIED.replace("TIE", "False"), spec))


def test_a_checkpoint_with_the_weights_inside_is_told_what_to_save(project, tmp_path):
    torch.save({"state_dict": STATE, "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(ModelRefused) as error:
        _load(project(LINEAR, WEIGHTED.replace("WEIGHTS", "w.pt")))
    assert error.value.hint.startswith("it holds 'state_dict': save one of these; ")


def test_a_factory_s_random_weights_are_the_same_in_each_build_and_the_caller_s_numbers_stay(project):
    path = project(LINEAR)
    torch.manual_seed(5)
    first = _load(path).layer.weight
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn) and torch.equal(_load(path).layer.weight, first)
