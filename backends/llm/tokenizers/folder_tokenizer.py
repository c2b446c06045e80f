"""The tokenizer of a Hugging Face folder: tokenizer.json and the files beside it, as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from backends.llm.tokenizers.chat_template import MAX_TEMPLATE, ChatTemplate
from backends.llm.tokenizers.failing import failing
from backends.llm.tokenizers.text_tokenizer import TextTokenizer, bytes_of_byte_level, bytes_of_sentencepiece
from compiler.errors import ModelRefused
from compiler.sources.huggingface_folder import check_plain, read_json

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder, of transformers 5
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "merges.txt")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_folder_tokenizer(path: Path) -> TextTokenizer:
    """Reads the tokenizer and compiles its chat templates.

    What stands before and behind a prompt is tokenizer.json's own rule. `add_bos_token` and `add_eos_token` beside it
    are what it was once made from: they may be missing, null or out of date, and transformers does not read them.

    Raises:
        ModelRefused: a file is missing, damaged or a link, or the tokenizer's kind is not supported.
    """
    shown = path.name
    _check_there(path, shown)
    content = read_json(path, TOKENIZER, shown)
    tokenizer = _parsed(content, f"{shown}/{TOKENIZER}")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _optional(path, SETTINGS, shown)
    named = _named_tokens(_optional(path, "special_tokens_map.json", shown) | settings)
    piece_bytes, strips_space = _how_pieces_become_bytes(tokenizer, f"{shown}/{TOKENIZER}")
    return TextTokenizer(
        tokenizer,
        piece_bytes=piece_bytes,
        strips_space=strips_space,
        eos_token_ids=_eos_token_ids(path, tokenizer, named, shown),
        templates=_templates(path, settings, shown),
        special_tokens=named,
    )


def _check_there(path: Path, shown: str) -> None:
    """Refuses a folder without tokenizer.json; other forms of the same tokenizer are not read, and can be converted."""
    if (path / TOKENIZER).exists() or (path / TOKENIZER).is_symlink():
        return
    others = [name for name in _OTHER_FORMS if (path / name).exists()]
    if not others:
        raise ModelRefused(f"{shown}/{TOKENIZER} does not exist", hint=f"looked for {path / TOKENIZER}")
    raise ModelRefused(
        f"{shown}/{TOKENIZER} does not exist, and {', '.join(others)} beside it is not read",
        hint="make it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
    )


def _optional(path: Path, name: str, shown: str) -> dict[str, Any]:
    exists = (path / name).exists() or (path / name).is_symlink()
    return read_json(path, name, shown) if exists else {}


def _parsed(content: dict[str, Any], shown: str) -> tokenizers.Tokenizer:
    with failing(lambda why: ModelRefused(f"{shown} is not a valid tokenizer: {why}")):
        return tokenizers.Tokenizer.from_str(json.dumps(content))


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tokens that have a part, such as "eos_token": a text, or an object with one."""
    found = {}
    for name in _NAMED:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _how_pieces_become_bytes(tokenizer: tokenizers.Tokenizer, shown: str) -> tuple[Callable[[str], bytes], bool]:
    """Returns the rule, and whether decoding takes a space away; read from the decoder."""
    # As the library understood it: a decoder can be written in more than one way.
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return bytes_of_byte_level, False
    replaces = any(s.get("type") == "Replace" and s.get("pattern") == {"String": _SPACE} for s in steps)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and (replaces or "Metaspace" in kinds):
        prepends = any(s.get("type") == "Metaspace" and s.get("prepend_scheme") != "never" for s in steps)
        return bytes_of_sentencepiece, prepends or "Strip" in kinds
    raise ModelRefused(
        f"{shown}: the decoder is {' '.join(sorted(map(str, kinds)))}; allowed: ByteLevel, or SentencePiece's "
        f"(Replace {_SPACE!r}, ByteFallback, Fuse, Strip; Metaspace)"
    )


def _eos_token_ids(path: Path, tokenizer: tokenizers.Tokenizer, named: Mapping[str, str], shown: str) -> frozenset[int]:
    """Returns the tokens that end an answer: of generation_config.json or else config.json, and the named one."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = _optional(path, name, shown).get("eos_token_id")
        if value is not None:
            found = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in found):
                raise ModelRefused(f"{shown}/{name}: 'eos_token_id' is {str(value)[:80]!r}; wanted: token ids")
            break
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return frozenset([*found, *([] if own is None else [own])])


def template_files(path: Path) -> dict[str, Path]:
    """Returns the files of a folder's chat templates by name, as transformers writes several of them.

    A published version has no folders in it: there they are called by `flat_template_name`.
    """
    prefix, suffix = flat_template_name("*").split("*")
    found = {file.name[len(prefix) : -len(suffix)]: file for file in sorted(path.glob(flat_template_name("*")))}
    found |= {file.stem: file for file in sorted((path / MORE_TEMPLATES).glob("*.jinja"))}
    if (path / TEMPLATE).exists() or (path / TEMPLATE).is_symlink():
        found["default"] = path / TEMPLATE
    return found


def flat_template_name(name: str) -> str:
    """Returns what the file of a template that is not the default is called beside the others."""
    return f"chat_template.{name}.jinja"


def _template_file(file: Path, shown: str) -> ChatTemplate:
    size = check_plain(file, shown)
    if size > 4 * MAX_TEMPLATE:
        raise ModelRefused(f"{shown} has {size} bytes; allowed: {4 * MAX_TEMPLATE}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{shown} is not UTF-8") from error
    return ChatTemplate(text, shown)


def _templates(path: Path, settings: Mapping[str, Any], shown: str) -> dict[str, ChatTemplate]:
    """Returns the chat templates by name: of their own files, or of the settings, which may hold one or a list."""
    files = template_files(path)
    if files:
        return {name: _template_file(file, f"{shown}/{file.relative_to(path)}") for name, file in files.items()}
    given = settings.get("chat_template")
    listed = given if isinstance(given, list) else [{"name": "default", "template": given}] if given else []
    found = {}
    for entry in listed:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelRefused(f"{shown}/{SETTINGS}: 'chat_template' is neither a text nor a list of named ones")
        found[name] = ChatTemplate(source, f"{shown}/{SETTINGS}: the chat template '{name}'")
    return found
