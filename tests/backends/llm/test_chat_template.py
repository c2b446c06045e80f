"""Chat templates: rendered as transformers renders them, and stopped where they would not end."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from backends.llm.errors import InvalidRequest
from backends.llm.tokenizers.chat_template import MAX_TEMPLATE, ChatTemplate
from compiler.errors import ModelkilnError, ModelRefused

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "  Be brief & <kind>. "},
    {"role": "user", "content": "What is 1+1?\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}],
    },
    {"role": "tool", "content": '{"sum": 2}'},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Danke"},
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "a 'sum' <b>", "parameters": {"type": "object"}}}
]
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{ "\\n" ~ (tool | tojson) }}{% endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if loop.last or not loop.first %}{{ '<|im_start|>' + message.role + '\\n' }}{% endif %}
    {%- generation %}{{ content.split('</think>')[-1].lstrip('\\n') }}{% endgeneration %}
    {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}{{ '<tool_call>%s' % tool_call.function.name }}{% endfor %}
    {%- endif %}
    {{- ns.last_query_index ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- macro ask(who) %}<|im_start|>{{ who }}
{% endmacro %}
{%- if add_generation_prompt %}{{ ask('assistant') }}{% endif %}
"""


def _render(source: str, messages: Any = MESSAGES, **options: Any) -> str:
    return ChatTemplate(source, "t.gguf: the template").render(messages, special_tokens=SPECIAL, **options)


def _refusal(source: str, messages: Any = MESSAGES) -> str:
    """Returns the message; more memory than 512 MB is refused by the system, and would be a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), limits[1]))
    try:
        with pytest.raises(ModelkilnError) as caught:
            _render(source, messages)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    # A template that is wrong is the model's fault, one that fails on some messages ends one request.
    assert isinstance(caught.value, InvalidRequest if "on these messages" in str(caught.value) else ModelRefused)
    assert "MemoryError" not in str(caught.value)
    assert str(caught.value).startswith("t.gguf: the template")
    return str(caught.value)


@pytest.mark.parametrize("source", [LLAMA, QWEN])
@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers_renders(source: str, tools: Any, prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    plain = [{k: v for k, v in m.items() if v is not None} for m in MESSAGES]  # as its caller does
    expected, _ = utils.render_jinja_template(
        [plain], tools=list(tools) or None, chat_template=source, add_generation_prompt=prompt, **SPECIAL
    )
    assert _render(source, tools=tools, add_generation_prompt=prompt) == expected[0]


def test_blocks_are_trimmed() -> None:
    assert _render("{% if true %}\n   {% set x = 1 %}\na{{ x }}\n{% endif %}\n", []) == "a1\n"


def test_large_numbers_and_formats_of_ordinary_width() -> None:
    """What the limits must not catch."""
    user = [{"role": "user", "content": 1_700_000_000_123}]
    source = "{{ messages[0].content|string }} {{ x|default(1700000000) }} {{ '%5.1f|%s' % (2, 'a') }}"
    source += " {{ '{:>4}'.format(7) }} {{ 1700000000|tojson }} {{ 1700000000|round }}"
    assert _render(source, user) == "1700000000123 1700000000   2.0|a    7 1700000000 1700000000"
    long = [{"role": "user", "content": "word\n" * 100_000}]
    assert len(_render("{{ messages[0].content|replace('\n', ' ')|trim }}", long)) == 499_999


def test_tojson_leaves_letters_alone() -> None:
    assert _render("{{ messages[0].content | tojson }}", [{"role": "user", "content": "<ü> '&"}]) == '"<ü> \'&"'


def test_a_date_and_an_exception() -> None:
    assert _render("{{ strftime_now('%Y')|int > 2000 }}") == "True"
    assert "fails on these messages: roles must alternate" in _refusal("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ (messages|attr('append'))(1) }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    _refusal(source)


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ messages[0].content.split.__self__ }}"])
def test_attributes_of_functions_are_undefined(source: str) -> None:
    assert _render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ ('a' * 10000000) * 1000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 2 ** 1000000000 }}",
        "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
        "{{ 'a'|center(2000000000) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ 'a'.zfill(2000000000) }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'a' * 100000) }}",
        "{{ (range(100000)|list)|join('a' * 100000) }}",
        "{{ ('a' * 100000).join(range(100000)|map('string')) }}",
        "{{ ('\\n' * 100000)|indent(1000000) }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
        "{% set ns = namespace(s=['a']) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = 'a' * 9000000 %}{% set x %}{% for i in range(10000) %}{{ s }}{% endfor %}{% endset %}{{ x }}",
        "{% set s = 'a' * 9000000 %}{% for i in range(10000) %}{{ s }}{% endfor %}",
        "{% set s = 'a' * 9000000 %}{% set ns = namespace(l=[]) %}"
        "{% for i in range(10000) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set s = 'a' * 16000000 %}{% for i in range(100000) %}{{ s.count('b') }}{% endfor %}",
        "{% set s = 'a' * 16000000 %}{% for i in range(100000) %}{% if 'b' in s %}{% endif %}{% endfor %}",
        "{{ 1|round(-1000000000) }}",
        "{{ strftime_now('%A' * 1000000) }}",
        "{{ [[1]]|tojson(indent=1000000000) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ range(100000)|map('string')|map('center', 100000)|list }}",
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str) -> None:
    _refusal(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "is not a template"),
        ("{{ 'a' | nothing }}", "is not a template: No filter named 'nothing'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is not a template"),
        ("a" * (MAX_TEMPLATE + 1), f"has {MAX_TEMPLATE + 1} characters; allowed: {MAX_TEMPLATE}"),
        ("{{ messages[0].content.x.y }}", "fails on these messages"),
    ],
)
def test_what_is_no_template_is_refused(source: str, words: str) -> None:
    assert words in _refusal(source)


def test_messages_are_json_and_not_too_deep() -> None:
    class Trap:
        pass

    assert "Trap" in _refusal("{{ messages }}", [{"role": "user", "content": Trap()}])
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    assert "nested deeper than 100" in _refusal("{{ messages }}", [{"role": "user", "content": deep}])


def test_the_tracer_of_a_debugger_is_put_back() -> None:
    import sys

    def tracer(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        _render("{{ 1 }}")
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_settings_are_known_by_name_and_hide_nothing_of_the_request() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}{{ bos_token }}"
    settings = {"enable_thinking": False, "messages": [], "bos_token": "x"}
    assert _render(source, settings=settings) == f"False{len(MESSAGES)}{SPECIAL['bos_token']}"
    assert _render("{{ enable_thinking is defined }}") == "False"
    for bad in ({"range": 5}, {"raise_exception": {"a": 1}}):  # only its own prompt fails
        with pytest.raises(InvalidRequest):
            _render("{{ range(3) | list }}{{ raise_exception('x') }}", settings=bad)
