"""`compile llm` of odd Hugging Face folders: what works is taken, what is broken is said for what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from compiler.cli import main

pytest.importorskip("openvino")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

VOCAB = 258


def _folder(path: Path, vocab_size: int = VOCAB, first_id: int = 2) -> Path:
    """Writes a random Llama whose tokenizer has a token for each byte: a text of 100 letters has 100 tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = {"<s>": 0, "</s>": 1, **{letter: first_id + i for i, letter in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _run(source: Path, repository: Path, *options: str) -> Result:
    repository.mkdir()
    given = ("--exact", "--kv-cache-memory", "1MiB", "--json", *options)
    return CliRunner().invoke(main, ["llm", str(source), "--name", "m", "-r", str(repository), *given])


def test_texts_of_just_as_many_tokens_as_are_judged(tmp_path: Path) -> None:
    """The reference had no room for the token that comes after 96, and refused every model with a short vocabulary."""
    done = _run(_folder(tmp_path / "model"), tmp_path / "repository")
    assert done.exit_code == 0, done.output
    # One text of more than 96 bytes, the others whole.
    assert json.loads(done.stdout)["manifest"]["llm"]["parity"]["num_positions"] == 44 + 55 + 96 + 73


def test_a_cache_smaller_than_the_texts(tmp_path: Path) -> None:
    # 2 x 2 layers x 1 head x 32 x 4 bytes = 512 bytes a token: two blocks of 32
    done = _run(_folder(tmp_path / "model"), tmp_path / "repository", "--kv-cache-memory", "32KiB")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["manifest"]["llm"]["parity"]["num_positions"] == 44 + 55 + 63 + 63


def test_broken_weights_are_named_and_not_taken_for_a_fault_of_the_runner(tmp_path: Path) -> None:
    source = _folder(tmp_path / "model")
    _edit(source, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    done = _run(source, tmp_path / "repository")
    assert done.exit_code == 1 and "NaN or infinity stands in model.norm.weight" in done.output
    assert "--weights bf16" not in done.output and not (tmp_path / "repository" / "m").exists()


def test_empty_weights_prove_nothing(tmp_path: Path) -> None:
    source = _folder(tmp_path / "model")
    _edit(source, lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    done = _run(source, tmp_path / "repository")
    assert done.exit_code == 1 and "logits are the same for all tokens" in done.output
    assert not (tmp_path / "repository" / "m").exists()


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    done = _run(_folder(tmp_path / "model", first_id=200), tmp_path / "repository")
    assert done.exit_code == 1 and "the model's vocabulary ends at 257" in done.output
    assert "the tokenizer is another model's" in done.output


def test_a_cache_that_the_system_does_not_give(tmp_path: Path) -> None:
    done = _run(_folder(tmp_path / "model"), tmp_path / "repository", "--kv-cache-memory", "100000TiB")
    assert done.exit_code == 2 and "kv_cache_bytes is too large: the system does not give" in done.output


def test_a_name_on_the_hub_is_not_downloaded_and_the_error_says_so(tmp_path: Path) -> None:
    done = _run(Path("HuggingFaceTB/SmolLM2-135M"), tmp_path / "repository")
    assert done.exit_code == 1 and "HuggingFaceTB/SmolLM2-135M does not exist" in done.output
    assert "hf download" in done.output


def test_what_may_surprise_is_said(tmp_path: Path) -> None:
    """This tokenizer names no end token, and transformers' default in config.json is 2: a letter of it."""
    source = _folder(tmp_path / "model")
    done = _run(source, tmp_path / "first", "--max-model-len", "1000")
    assert done.exit_code == 0 and "max_model_len 1000 is cut to 256" in done.stderr
    assert "no token ends an answer" not in done.stderr
    for name in ("config.json", "generation_config.json"):
        keys = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps({**keys, "eos_token_id": 5000 if name == "config.json" else None}))
    done = _run(source, tmp_path / "second")
    assert done.exit_code == 0 and "no token ends an answer" in done.stderr and "is cut to" not in done.stderr
