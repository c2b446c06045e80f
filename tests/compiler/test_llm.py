"""`compile llm`: a real model published and opened again; what is refused leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from compiler.cli import main
from compiler.errors import UsageError
from compiler.llm.parity import EXACT, FAST, compare_logits
from compiler.repository import Repository
from tests.serving import write_llm

pytest.importorskip("openvino")
torch = pytest.importorskip("torch")


OPTIONS = ("--exact", "--kv-cache-memory", "64MiB", "--max-num-seqs", "16", "--default-deadline-ms", "90000", "--json")


def run(*arguments: object):
    return CliRunner().invoke(main, ["llm", *map(str, arguments)])


@pytest.fixture(scope="module")
def published(smollm2, tmp_path_factory):
    """SmolLM2 published in exact mode with a small cache, and what the command said."""
    repository = tmp_path_factory.mktemp("repository")
    done = run(smollm2, "--name", "smollm2", "-r", repository, *OPTIONS)
    assert done.exit_code == 0, done.output
    return repository, json.loads(done.stdout)


def test_a_published_model_says_what_it_is_and_how_well_it_was_proved(published, smollm2):
    repository, result = published
    facts = result["manifest"]["llm"]
    assert (facts["architecture"], facts["quantization"], facts["max_model_len"]) == ("llama", "Q4_1", 4096)
    assert result["manifest"]["parameters"] == 134_515_008
    # 2 x 30 layers x 3 heads x 64 x 4 bytes = 46,080 bytes a token in float32
    assert facts["capacity"]["block_bytes"] == 46_080 * facts["capacity"]["block_size"]
    assert facts["capacity"]["num_blocks"] == (64 << 20) // facts["capacity"]["block_bytes"]
    assert facts["parity"]["nmse"] < 1e-8 and facts["parity"]["agreement"] == 1.0
    names = sorted(p.name for p in (repository / "smollm2" / "1").iterdir())
    assert [name for name in names if not name.startswith("graph-")] == ["engine.json", "manifest.json", "model.gguf"]
    assert sorted(Path(name).suffix for name in names if name.startswith("graph-")) == [".bin", ".xml"]
    assert {name for name in names if name != "manifest.json"} == set(result["manifest"]["files"])
    settings = json.loads((repository / "smollm2" / "1" / "engine.json").read_text())
    assert (settings["max_num_seqs"], settings["max_waiting"]) == (16, 128)
    config = (repository / "smollm2" / "config.pbtxt").read_text()
    assert 'key: "default_deadline_ms"' in config and 'string_value: "90000"' in config
    assert 'backend: "llm"' in config and "decoupled: true" in config


def verify(*arguments: object):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_it_is_proved_again_from_its_own_files(published):
    repository, result = published
    done = verify("smollm2", "-r", repository, "--json")
    assert done.exit_code == 0, done.output
    again = json.loads(done.stdout)
    built = result["manifest"]["llm"]["parity"]
    assert again["passed"] and again["parity"]["num_positions"] == built["num_positions"]
    assert again["parity"]["nmse"] < 1e-8 and again["parity"]["agreement"] == 1.0
    assert verify("smollm2", "-r", repository, "--spec", "x.yaml").exit_code == 2


def test_another_model_or_damage_is_not_proved_again(published, tmp_path, monkeypatch):
    """A runner that computes something else fails, and files that changed are not even opened; neither is pinned."""
    from backends.llm.runners.openvino import OpenVinoRunner

    repository = tmp_path / "repository"
    shutil.copytree(published[0], repository, copy_function=os.link)
    monkeypatch.setattr("compiler.llm.parity.TEXTS", ("One sentence is enough here.",))
    pinning = ["pin", "smollm2", "1", "-r", str(repository)]
    assert CliRunner().invoke(main, pinning).exit_code == 0 and Repository(repository).pinned("smollm2") == [1]
    Repository(repository).replace_config("smollm2", (published[0] / "smollm2" / "config.pbtxt").read_text())
    execute = OpenVinoRunner.execute
    monkeypatch.setattr(
        OpenVinoRunner, "execute", lambda self, output: type(found := execute(self, output))(found.logits[:, ::-1])
    )
    done = verify("smollm2", "-r", repository)
    assert done.exit_code == 1 and "the normalised mean square error is" in done.output
    done = CliRunner().invoke(main, pinning)
    assert done.exit_code == 1 and "is not what was published: the normalised mean square error is" in done.output
    settings = repository / "smollm2" / "1" / "engine.json"
    text = settings.read_text()
    settings.unlink()  # the other name of the file keeps its content
    settings.write_text(text.replace("64", "65") + " ")
    done = verify("smollm2", "-r", repository)
    assert done.exit_code == 1 and "engine.json" in done.output
    assert CliRunner().invoke(main, pinning).exit_code == 1 and Repository(repository).pinned("smollm2") == []


def test_the_linter_passes_it(published):
    repository, _ = published
    done = CliRunner().invoke(main, ["check", str(repository)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("count: 1", "count: 2", "instance_group has the counts [2]; allowed: 1 on a device"),  # f07
        ("decoupled: true", "decoupled: false", "model_transaction_policy.decoupled is not true"),
        ("max_batch_size: 0", "max_batch_size: 4", "max_batch_size is 4; it must be 0"),
        ('"llm"', '"llm"\nparameters { key: "default_deadline_ms" value { string_value: "soon" } }', "is 'soon'"),
    ],
)
def test_f07_the_linter_refuses_a_config_that_would_not_serve(old, new, words, tmp_path):
    version = write_llm(tmp_path, "m", Path(__file__))
    config = version.parent / "config.pbtxt"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    done = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert done.exit_code == 1 and words in done.output and done.output.count("m: ") == 1


@pytest.mark.parametrize(
    "settings, words",
    [
        (None, "version 1 has no engine.json, which compile llm writes"),
        ("{", "engine.json is not valid JSON"),
        ('{"model": "gone.gguf"}', "version 1 has no gone.gguf"),
        ('{"weights": "int3"}', "weights is 'int3'; allowed"),
        ("{}", "version 1 has no config.json and no *.safetensors"),
        ('{"draft_model": "draft.gguf"}', "version 1 has no draft.gguf"),
        ('{"draft_model": "../draft.gguf"}', "'draft_model' is '../draft.gguf'; allowed: the name of a file"),
    ],
)
def test_the_linter_knows_what_a_version_folder_needs(settings, words, tmp_path):
    version = write_llm(tmp_path, "m", Path(__file__))
    (version / "engine.json").unlink()
    if settings is not None:
        (version / "engine.json").write_text(settings)
    done = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert done.exit_code == 1 and words in done.output and str(tmp_path) not in done.output


def test_nothing_is_done_the_second_time(published, smollm2):
    repository, _ = published
    done = run(smollm2, "--name", "smollm2", "-r", repository, *OPTIONS)
    assert done.exit_code == 0 and json.loads(done.stdout)["built"] is False


def test_a_published_folder_opens_as_it_was_published(published):
    from backends.llm import LLMEngine, SamplingParams

    repository, _ = published
    engine = LLMEngine.load(repository / "smollm2" / "1")
    try:
        assert engine.stats().scheduler.num_blocks == (64 << 20) // (46_080 * 32)
        (result,) = engine.generate(["The capital of France is"], SamplingParams(max_tokens=2))
        assert result.outputs[0].text == " Paris."
    finally:
        engine.close()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--weights", "int3"], "weights is 'int3'; allowed"),
        (["--kv-cache-memory", "lots"], "--kv-cache-memory is 'lots'"),
        (["--draft-model", "folder"], "--draft-model is folder; allowed: a GGUF file"),
        (["--max-num-seqs", "600"], "max_num_batched_tokens is 512, less than max_num_seqs 600"),
        (["--kv-cache-memory", "1KiB"], "one block takes"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_published(arguments, words, smollm2, tmp_path):
    done = run(smollm2, "--name", "m", "-r", tmp_path, *arguments)
    assert done.exit_code == 2 and words in done.output
    assert not (tmp_path / "m").exists()


def test_what_is_no_model_is_refused(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    done = run(broken, "--name", "m", "-r", tmp_path / "repository")
    assert done.exit_code == 1 and "broken.gguf" in done.output and not (tmp_path / "repository").exists()
    done = run(tmp_path / "absent.gguf", "--name", "m", "-r", tmp_path / "repository")
    assert done.exit_code in (1, 2, 3) and "absent.gguf" in done.output


def test_the_torch_runner_is_published_with_its_options(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr("compiler.llm.parity.TEXTS", ("One sentence is enough here.",))
    options = ("--runner", "torch", "--device", "auto", "--dtype", "bfloat16", "--kv-cache-memory", "64MiB")
    done = run(smollm2, "--name", "torch", "-r", tmp_path, *options, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)["manifest"]["llm"]
    assert facts["capacity"]["block_bytes"] == 23_040 * 16  # 2 x 30 layers x 3 heads x 64 x 2 bytes
    assert 1e-8 < facts["parity"]["nmse"] < FAST.nmse  # bfloat16, and judged as such
    settings = json.loads((tmp_path / "torch" / "1" / "engine.json").read_text())
    assert (settings["runner"], settings["dtype"], settings["device"]) == ("torch", "bfloat16", "auto")
    assert "KIND_MODEL" in (tmp_path / "torch" / "config.pbtxt").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told_before_anything_is_read(smollm2, tmp_path):
    done = run(smollm2, "--name", "x", "-r", tmp_path, "--runner", "torch", "--device", "cuda")
    assert done.exit_code == 3 and "torch sees no GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--runner", "torch", "--dtype", "int8"), "allowed: float32, bfloat16, float16"),
        (("--runner", "torch", "--device", "tpu"), "allowed: auto, cpu, cuda, cuda:N"),
        (("--runner", "torch", "--gpu-memory-utilization", "1.5"), "gpu_memory_utilization is 1.5"),
        (("--device", "cuda"), "there is no option 'device'"),
    ],
)
def test_options_of_the_torch_runner_are_checked(smollm2, tmp_path, options, words):
    done = run(smollm2, "--name", "x", "-r", tmp_path, *options)
    assert done.exit_code == 2 and words in done.stderr


def test_a_damaged_settings_file_is_refused_by_name(tmp_path):
    from backends.llm.engine.load import stored_settings
    from compiler.errors import ModelRefused

    for text, words in (("{", "not valid JSON"), ("[]", "no object"), ('{"model": "../x.gguf"}', "'../x.gguf'")):
        (tmp_path / "engine.json").write_text(text)
        with pytest.raises(ModelRefused, match=words):
            stored_settings(tmp_path)


def test_engine_options_are_checked_by_name():
    from backends.llm.engine.load import engine_settings

    with pytest.raises(UsageError, match=r"no option 'max_num_sec' \(did you mean 'max_num_seqs'"):
        engine_settings({"max_num_sec": 4})
    with pytest.raises(UsageError, match="runner is 'gpu'; allowed: auto, numba, openvino, torch"):
        engine_settings({"runner": "gpu"})
    with pytest.raises(UsageError, match="num_draft_tokens is -1"):
        engine_settings({"num_draft_tokens": -1})


def test_the_comparison_sees_wrong_logits():
    random = np.random.default_rng(0)
    reference = [random.normal(size=(6, 50)).astype(np.float32)]
    assert compare_logits(reference, reference, EXACT).problem == ""
    noisy = [reference[0] + random.normal(size=(6, 50)).astype(np.float32) * 0.01]
    assert "normalised mean square error" in compare_logits(noisy, reference, EXACT).problem
    assert compare_logits(noisy, reference, FAST).problem == ""
    shifted = [np.roll(reference[0], 1, axis=0)]
    assert "most likely token agrees in" in compare_logits(shifted, reference, FAST).problem
    broken = [reference[0].copy()]
    broken[0][2, 3] = np.nan
    assert compare_logits(broken, reference, FAST).problem == "1 logits are not finite"
    constant = [np.zeros((1, 4), np.float32)]
    assert "is nan" in compare_logits(constant, constant, FAST).problem  # 0 / 0 proves nothing
    # sum((x - r)^2) / sum((r - mean)^2) by hand: one row [0, 2] against [0, 1]: 1 / 0.5
    hand = compare_logits([np.array([[0.0, 2.0]], np.float32)], [np.array([[0.0, 1.0]], np.float32)], FAST)
    assert hand.nmse == pytest.approx(2.0) and hand.max_abs == 1.0
