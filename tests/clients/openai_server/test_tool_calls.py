"""Tool calls found in text, however it is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clients.openai_server.tool_calls import CallDelta, HermesParser, NamedParser, RequiredParser

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def _parsed(pieces: Sequence[str]) -> list[Any]:
    """Texts put together between the calls; a call as its name and arguments."""
    ids = count()
    parser = HermesParser({"add", "now"}, lambda: f"call_{next(ids)}")
    found: list[Any] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + list(parser.finish()):
        if isinstance(part, CallDelta):
            assert (part.index, part.id) == (len([f for f in found if isinstance(f, tuple)]), f"call_{part.index}")
            found.append((part.name, json.loads(part.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


CASES = {
    "": [],
    "plain text": ["plain text"],
    ADD: [("add", {"a": 1})],
    f"\n{ADD}\n": [("add", {"a": 1})],
    f"First.\n\n{ADD} \n {ADD}": ["First.", ("add", {"a": 1}), ("add", {"a": 1})],
    '<tool_call>\n{"name": "now"}\n</tool_call>': [("now", {})],
    ADD.removesuffix("</tool_call>"): [("add", {"a": 1})],  # models often end without it
    "<tool_call>{oops}</tool_call> x": ["<tool_call>{oops}</tool_call> x"],
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>': [
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    ],
    '<tool_call>{"name": "add", "arguments": [1]}': ['<tool_call>{"name": "add", "arguments": [1]}'],
    '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>': [  # a name that cannot even be looked up
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>'
    ],
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}': ['<tool_call>{"name": "add", "arguments": {"a": NaN}}'],
    "a < b <tool <tool_cal": ["a < b <tool <tool_cal"],
    "<tool_call>" + "[" * 5000: ["<tool_call>" + "[" * 5000],
    "trailing  \n": ["trailing  \n"],
}


def test_what_is_found() -> None:
    for text, expected in CASES.items():
        assert _parsed([text]) == expected, text[:80]


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 120), max_size=12))
def test_pieces_do_not_matter(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert _parsed(pieces) == CASES[text]


def test_text_leaves_as_soon_as_it_can_be_no_tag() -> None:
    parser = HermesParser({"add"}, lambda: "call")
    assert [list(parser.push(piece)) for piece in ("a", " ", "b<", "tool", "x")] == [["a"], [], [" b"], [], ["<toolx"]]


def test_the_arguments_of_a_named_function_stream() -> None:
    parser = NamedParser("add", lambda: "call_1")
    found = [parser.push(piece) for piece in ('{"a"', "", ": 1}")]
    assert found == [[CallDelta(0, '{"a"', "call_1", "add")], [], [CallDelta(0, ": 1}")]]
    assert parser.finish() == []


def test_a_required_call_comes_whole_and_a_cut_one_as_text() -> None:
    parser = RequiredParser(lambda: "call_1")
    assert [*parser.push('{"name": "add", '), *parser.push('"arguments": {"a": 1}}')] == []
    assert parser.finish() == [CallDelta(0, '{"a": 1}', "call_1", "add")]
    cut = RequiredParser(lambda: "call_1")
    cut.push('{"name": "ad')
    assert cut.finish() == ['{"name": "ad']


def test_a_client_that_takes_one_call_gets_the_first() -> None:
    parser = HermesParser({"add"}, lambda: "call", single=True)
    text = f"{ADD}\n{ADD.replace('1', '2')}" + ADD.removesuffix("</tool_call>")
    found = [*parser.push(text), *parser.finish()]
    assert found == [CallDelta(0, '{"a": 1}', "call", "add")]


def test_arguments_are_text_that_can_be_sent() -> None:
    """Half of a surrogate pair is JSON and no Unicode: a client could not even write it back."""
    text = '{"name": "add", "arguments": {"a": "\\ud83d ü"}}'
    required = RequiredParser(lambda: "call")
    required.push(text)
    for parts in (HermesParser({"add"}, lambda: "call").push(f"<tool_call>{text}</tool_call>"), required.finish()):
        (made,) = parts
        assert isinstance(made, CallDelta) and made.arguments == '{"a": "\\ud83d \\u00fc"}'
