"""The `source` of a model spec: exactly one kind of source, each with its own keys. Nothing is opened here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compiler.errors import did_you_mean, one_of
from compiler.yaml_reader import Node

FUNCTION = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_CLASS = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class FactorySource:
    """A `module:function` that returns an nn.Module, and optionally a weight file to load into it."""

    factory: str
    args: dict[str, Any]
    weights: str | None
    ignore_weights: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file; its external data lies in the same folder."""

    onnx: str


@dataclass(frozen=True)
class ExportedProgramSource:
    """An archive that `torch.export.save` wrote."""

    exported_program: str


@dataclass(frozen=True)
class HuggingFaceSource:
    """A folder with `config.json` and weights, and the class of `transformers` that reads them.

    Attributes:
        ignore_weights: globs of weights that the class does not need, or that the files may lack.
    """

    huggingface: str
    model_class: str
    ignore_weights: tuple[str, ...]


Source = FactorySource | OnnxSource | ExportedProgramSource | HuggingFaceSource

KINDS = ("factory", "onnx", "exported_program", "huggingface")


def read_source(node: Node) -> Source:
    """Reads the source; the key that names the kind decides which other keys there may be.

    Raises:
        SpecError: no kind or more than one, or a key that the kind does not have.
    """
    named = [kind for kind in KINDS if kind in node.mapping("source")]
    if not named:
        wrong = next((f"'{k}'{did_you_mean(k, KINDS)}" for k in node.value if did_you_mean(k, KINDS)), "")
        seen = wrong or ", ".join(f"'{k}'" for k in node.value) or "nothing"
        node.fail(f"source has no kind: it holds {seen}; exactly one is required of: {one_of((*KINDS, 'python'))}")
    if len(named) > 1:
        # The later one in the file is where the reader looks.
        last = max((node.value[k] for k in named), key=lambda n: n.line)
        last.fail(f"source has two kinds: {' and '.join(named)}; exactly one is allowed")
    return _READERS[named[0]](node)


def _factory(node: Node) -> FactorySource:
    table = node.table("source", required=("factory",), optional=("args", "weights", "ignore_weights", "files"))
    factory = table["factory"].string("source.factory")
    if not FUNCTION.fullmatch(factory):
        table["factory"].fail(
            f"source.factory is {factory!r}; allowed: 'package.module:function', a function that returns an nn.Module"
        )
    args, weights, ignore, files = (table.get(k) for k in ("args", "weights", "ignore_weights", "files"))
    if ignore and not weights:
        ignore.fail("source.ignore_weights says which weights to leave out, but there is no source.weights")
    return FactorySource(
        factory=factory,
        args={k: v.plain() for k, v in args.mapping("source.args").items()} if args else {},
        weights=weights.string("source.weights") if weights else None,
        ignore_weights=strings(ignore, "source.ignore_weights"),
        files=strings(files, "source.files"),
    )


def _onnx(node: Node) -> OnnxSource:
    return OnnxSource(node.table("source", required=("onnx",))["onnx"].string("source.onnx"))


def _exported_program(node: Node) -> ExportedProgramSource:
    table = node.table("source", required=("exported_program",))
    return ExportedProgramSource(table["exported_program"].string("source.exported_program"))


def _huggingface(node: Node) -> HuggingFaceSource:
    table = node.table("source", required=("huggingface", "model_class"), optional=("ignore_weights",))
    model_class = table["model_class"].string("source.model_class")
    if not _CLASS.fullmatch(model_class):
        table["model_class"].fail(
            f"source.model_class is {model_class!r}; allowed: the name of a class of transformers, such as AutoModel"
        )
    return HuggingFaceSource(
        huggingface=table["huggingface"].string("source.huggingface"),
        model_class=model_class,
        ignore_weights=strings(table.get("ignore_weights"), "source.ignore_weights"),
    )


_READERS: dict[str, Callable[[Node], Source]] = {
    "factory": _factory,
    "onnx": _onnx,
    "exported_program": _exported_program,
    "huggingface": _huggingface,
}


def strings(node: Node | None, what: str) -> tuple[str, ...]:
    """Reads a list of texts; nothing where there is no node."""
    return tuple(item.string(f"an entry of {what}") for item in node.items(what)) if node else ()
