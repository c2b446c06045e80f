"""`compile kv-plan` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from compiler.cli import main
from tests.backends.llm.test_capacity import LLAMA_70B


def _run(*words: str) -> Any:
    return CliRunner().invoke(main, ["kv-plan", *words], prog_name="compile", terminal_width=100)


def _config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA_70B, "rms_norm_eps": 1e-5, **changes}))
    return path


def test_a_config_alone(tmp_path: Path) -> None:
    path = _config(tmp_path)
    result = _run("--model", str(path), "--memory", "80GiB", "--weight-bits", "4.5", "--length", "4096", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["parameters"] == 70_553_706_496 and found["weight_bytes"] == int(70_553_706_496 * 4.5 / 8)
    assert (found["kv_bytes_per_token"], found["kv_bytes_per_block"]) == (327_680, 5_242_880)
    blocks = (int((80 << 30) * 0.9) - found["weight_bytes"]) // 5_242_880
    assert found["num_blocks"] == blocks
    assert [(f["length"], f["num_blocks"], f["requests"]) for f in found["fits"]] == [(4096, 256, blocks // 256)]
    assert {"block_size": 16, "length": 4096, "tokens": 7.5, "share": 7.5 / 4103.5} in found["waste"]


def test_the_same_in_words(tmp_path: Path) -> None:
    result = _run("--model", str(_config(tmp_path)), "--memory", "80GiB", "--weight-bits", "4.5", "--dtype", "f32")
    assert result.exit_code == 0
    assert "2 x 80 layers x 8 heads x 128 x 4 bytes (f32) = 655,360 bytes a token" in result.output
    table = result.output.split("requests\n")[1].split("\n\n")[0]
    assert [line.split()[:2] for line in table.splitlines()] == [["512", "32"], ["2,048", "128"], ["8,192", "512"]]
    in_bytes = _run("--model", str(_config(tmp_path)), "--memory", "80GiB", "--dtype", "u8", "--block-size", "32")
    # 2 x 128 numbers a token and head, 8 bytes of scales for the values and a 32nd of 128 x 8 for the keys
    assert f"x 128 x 1 bytes (u8) and scales = {80 * 8 * (256 + 8 + 32):,} bytes a token" in in_bytes.output
    too_small = _run("--model", str(_config(tmp_path)), "--memory", "24GiB")
    assert too_small.exit_code == 0 and "nothing fits: the weights alone leave no room" in too_small.output


def test_a_windowed_model_says_what_is_read(tmp_path: Path) -> None:
    path = _config(tmp_path, model_type="gemma3_text", sliding_window=1024, num_hidden_layers=12)
    result = _run("--model", str(path), "--memory", "80GiB", "--length", "2048")
    assert result.exit_code == 0, result.output
    assert (
        "10 of 12 layers read the last 1,024 tokens only. This engine keeps all tokens of all layers" in result.output
    )


def test_a_gguf_file_counts_its_own_bytes(smollm2: Path) -> None:
    found = json.loads(_run("--model", str(smollm2), "--memory", "1GiB", "--json").output)
    assert found["parameters"] == 134_515_008 and 96_000_000 < found["weight_bytes"] < smollm2.stat().st_size
    assert [f["length"] for f in found["fits"]] == [512, 2048, 8192]


def test_a_folder_counts_its_weight_files_and_a_quantised_one_is_answered(tmp_path: Path) -> None:
    _config(tmp_path, quantization_config={"quant_method": "awq"})
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(500))
    found = json.loads(_run("--model", str(tmp_path), "--memory", "1GiB", "--json").output)
    assert found["weight_bytes"] == 1500


def test_memory_in_the_largest_unit(tmp_path: Path) -> None:
    fits = [
        json.loads(_run("--model", str(_config(tmp_path)), "--memory", memory, "--json").output)["fits"]
        for memory in ("1.5TiB", "1536GiB")
    ]
    assert fits[0] == fits[1] and fits[0][0]["requests"] > 1000


def test_wrong_usage(tmp_path: Path) -> None:
    path = str(_config(tmp_path))
    for words, said in (
        (["--model", path, "--memory", "24"], "'24' is not of the form 24GiB"),
        (["--model", path, "--memory", "0GiB"], "'0GiB' is not of the form"),
        (["--model", path, "--memory", "24GB"], "allowed: KiB, MiB, GiB, TiB"),
        (["--model", path, "--memory", "9" * 400 + "GiB"], "is not of the form"),
        (["--model", path, "--memory", "1GiB", "--block-size", "0"], "0 is not in the range"),
        (["--model", path, "--memory", "1GiB", "--dtype", "u4"], "'u4' is not one of"),
        (["--memory", "1GiB"], "Missing option '--model'"),
    ):
        result = _run(*words)
        assert result.exit_code == 2 and said in result.output
    for words, said in (
        (["--model", str(tmp_path / "none.json"), "--memory", "1GiB"], "does not exist"),
        (["--model", str(_config(tmp_path, model_type="gpt2")), "--memory", "1GiB"], "'model_type' is 'gpt2'"),
        (["--model", str(Path(__file__)), "--memory", "1GiB"], "is no model"),
        (["--model", "Qwen/Qwen3-0.6B", "--memory", "1GiB"], "models are read from disk and never downloaded"),
    ):
        result = _run(*words)
        assert result.exit_code == 1 and said in result.output
