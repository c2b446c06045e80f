"""Chat templates: a model's Jinja text, rendered as transformers renders it, bounded in steps and in size.

A template is foreign code. jinja2's immutable sandbox keeps it away from Python, but bounds neither time nor memory:
`template_limits` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from backends.llm.errors import InvalidRequest
from backends.llm.tokenizers.failing import failing
from backends.llm.tokenizers.template_limits import (
    LimitedCode,
    TooMuch,
    charged,
    check_call,
    check_operator,
    joined,
    limited,
)
from compiler.errors import ModelRefused

MAX_TEMPLATE = 1 << 20  # characters
MAX_DATE_FORMAT = 256  # characters
_MAX_DEPTH = 100  # of messages and tools


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template's text.
        shown: how errors name it.

    Raises:
        ModelRefused: it is no template, or too long.
    """

    def __init__(self, source: str, shown: str) -> None:
        self._shown = shown
        if len(source) > MAX_TEMPLATE:
            raise ModelRefused(f"{shown} has {len(source)} characters; allowed: {MAX_TEMPLATE}")
        environment = _environment()
        with failing(lambda why: ModelRefused(f"{shown} is not a template: {why}")), limited():
            self._template = environment.from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        special_tokens: Mapping[str, str],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns the prompt's text.

        Args:
            settings: more of what the template may ask for by name, such as Qwen3's `enable_thinking`.

        Raises:
            InvalidRequest: the template refuses these messages, fails on them, or does too much.
        """
        with failing(lambda why: InvalidRequest(f"{self._shown} fails on these messages: {why}", param="messages")):
            # Keys without a value are dropped, as OpenAI's clients send them and templates do not expect them.
            plain = [{k: _plain(v) for k, v in m.items() if v is not None} for m in messages]
            values = {
                **_plain(settings),
                **special_tokens,
                "messages": plain,
                "tools": _plain(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            with limited():
                return self._template.render(values)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with every operator and call checked for what it may cost."""

    code_generator_class = LimitedCode
    charged = staticmethod(charged)
    concat = staticmethod(joined)  # type: ignore[assignment]
    intercepted_binops = frozenset(["+", "*", "%", "**", "-", "/", "//"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return charged(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # The sandbox wraps `format`, so that it sees what that reads.
        target = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(target, str | list | tuple | dict):
            check_call(getattr(obj, "__name__", ""), (target, *args, *kwargs.values()))
        return charged(super().call(context, obj, *args, **kwargs))


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, with which templates mark an answer for training: only its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    # What templates have no use for: a plain Python function, and filters that are slow or no function of their input.
    del environment.globals["lipsum"], environment.filters["urlize"], environment.filters["random"]
    environment.filters = {name: _checked_filter(name, call) for name, call in environment.filters.items()}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _checked_filter(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_call(name, (*args, *kwargs.values()))
        return charged(call(*args, **kwargs))

    vars(checked).update(getattr(call, "__dict__", {}))  # jinja2 marks there what a filter wants to be passed first
    return checked


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORMAT:
        raise TooMuch(f"the date format has {len(form)} characters; allowed: {MAX_DATE_FORMAT}")
    return datetime.now().strftime(form)


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns a copy that is made of JSON's types alone: a template could call methods of others."""
    if depth > _MAX_DEPTH:
        raise TooMuch(f"they are nested deeper than {_MAX_DEPTH}")
    if value is None or type(value) in (str, bool, int):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise TypeError(f"{type(value).__name__} {str(value)[:40]!r} is no JSON value")
