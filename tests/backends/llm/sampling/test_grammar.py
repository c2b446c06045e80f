"""Masks against the plain way: every token's bytes tried behind the text; and what grammars of strangers may do."""

from __future__ import annotations

import http.server
import json
import random
import threading

import numpy as np
import pytest
import regex

from backends.llm.errors import InvalidRequest, LogitsError
from backends.llm.sampling.grammar import Grammars, MaskRequest
from backends.llm.sampling.grammar_source import Vocabulary, lark_from
from backends.llm.sampling.grammar_trial import GrammarTrial
from backends.llm.sampling.structured_outputs import structured_outputs_from
from backends.llm.tokenizers import load_tokenizer
from tests.backends.llm.sampling.tiny_tokenizers import byte_fallback, byte_level

FREE = '%llguidance {"no_forcing": true}\n'  # every token that fits is allowed, also where the text is forced


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request):
    return {"byte_level": byte_level, "byte_fallback": byte_fallback}[request.param]()


@pytest.fixture(scope="module")
def grammars(tokenizer):
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def bytewise():
    """Grammars over the byte-level vocabulary, and their tokenizer."""
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    yield grammars, tokenizer
    grammars.close()


def matcher_of(grammars, value, **kwargs):
    return grammars.compile(structured_outputs_from(value), **kwargs)


def allowed(grammars, matcher, drafts=()):
    """The allowed tokens of each row."""
    (mask,) = grammars.masks([MaskRequest(matcher, drafts)])
    assert not isinstance(mask, LogitsError)
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("pattern", ["a{1,3}", "[a-c]+x?", "(the|then|there)( the)*", "[0-9]{2}:[0-9]{2}", "x (a|b)*"])
def test_masks_are_those_of_trying_every_token(grammars, tokenizer, pattern):
    """Random walks through the language; the oracle is a partial match of the text with each token behind it."""
    rng = random.Random(pattern)
    ends = 0
    for _ in range(6):
        matcher = matcher_of(grammars, {"grammar": f"{FREE}start: /{pattern}/"})
        text = b""
        for _ in range(12):
            expected = {
                token_id
                for token_id in range(tokenizer.vocab_size)
                if (data := tokenizer.token_bytes(token_id))
                and (text + data).isascii()
                and regex.fullmatch(pattern, (text + data).decode(), partial=True)
            }
            if regex.fullmatch(pattern, text.decode()):
                expected |= tokenizer.eos_token_ids
            (seen,) = allowed(grammars, matcher)
            assert seen == expected, text
            token_id = rng.choice(sorted(expected))
            matcher.accept(token_id)
            text += tokenizer.token_bytes(token_id)
            if matcher.is_complete:
                ends += 1
                assert regex.fullmatch(pattern, text.decode())
                break
    assert ends


def test_characters_of_several_tokens(grammars, tokenizer):
    """Of "é" and "你" the bytes are tokens; no half of one may be followed by anything else."""
    matcher = matcher_of(grammars, {"choice": ["é", "你x"]})
    first = {
        t
        for t in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(t) and "é".encode().startswith(tokenizer.token_bytes(t))
    }
    first |= {
        t
        for t in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(t) and "你x".encode().startswith(tokenizer.token_bytes(t))
    }
    assert allowed(grammars, matcher) == [first]
    half = next(t for t in first if tokenizer.token_bytes(t) == "你".encode()[:1])
    matcher.accept(half)
    rest = "你x".encode()[1:]
    (seen,) = allowed(grammars, matcher)
    assert seen and all(rest.startswith(tokenizer.token_bytes(t)) for t in seen)


def test_drafts_have_a_row_each_and_move_nothing(grammars, tokenizer):
    def token(text):
        return next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == text.encode())

    matcher = matcher_of(grammars, {"grammar": FREE + "start: /t[he]*x/"})
    before = allowed(grammars, matcher)
    drafts = [token("t"), token("h"), token("n"), token("e")]  # "n" is not in the language
    rows = allowed(grammars, matcher, drafts)
    plain = matcher_of(grammars, {"grammar": FREE + "start: /t[he]*x/"})
    for row, draft in zip(rows[:3], drafts[:3], strict=True):
        assert allowed(grammars, plain) == [row]
        if draft == token("n"):
            assert draft not in row
            break
        plain.accept(draft)
    assert matcher.num_allowed(drafts) == 2
    assert allowed(grammars, matcher) == before


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_at_once_are_each_alone(bytewise, num_threads):
    _, tokenizer = bytewise
    grammars = Grammars(tokenizer, tokenizer.vocab_size, num_threads=num_threads)
    values = [{"regex": "[a-z]{2,5}"}, {"choice": ["then", "there"]}, {"json_object": True}, {"regex": "t+"}] * 4
    matchers = [matcher_of(grammars, value) for value in values]
    drafts = [[next(iter(allowed(grammars, m)[0]))] if i % 2 else [] for i, m in enumerate(matchers)]
    together = grammars.masks([MaskRequest(m, d) for m, d in zip(matchers, drafts, strict=True)])
    for matcher, draft, mask in zip(matchers, drafts, together, strict=True):
        (alone,) = grammars.masks([MaskRequest(matcher, draft)])
        assert np.array_equal(mask, alone)
    assert grammars.num_masks > 0 and grammars.mask_seconds > 0
    grammars.close()


def test_the_end_token_is_banned_where_it_does_not_end_the_answer(grammars, tokenizer):
    value = {"regex": "t{1,3}"}
    t = next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"t")
    (eos,) = tokenizer.eos_token_ids
    usual, ignoring = matcher_of(grammars, value), matcher_of(grammars, value, ignore_eos=True)
    for matcher in (usual, ignoring):
        assert eos not in allowed(grammars, matcher)[0]
        matcher.accept(t)
    assert eos in allowed(grammars, usual)[0]
    assert eos not in allowed(grammars, ignoring)[0] and t in allowed(grammars, ignoring)[0]
    assert (usual.num_allowed([t, eos]), ignoring.num_allowed([t, eos])) == (2, 1)
    for _ in range(2):
        assert not ignoring.is_complete
        ignoring.accept(t)
    assert ignoring.is_complete


def test_a_token_that_is_not_allowed(grammars, tokenizer):
    matcher = matcher_of(grammars, {"choice": ["then"]})
    with pytest.raises(LogitsError, match="structured_outputs"):
        matcher.accept(next(iter(tokenizer.eos_token_ids)))


def test_a_wider_output_than_the_vocabulary(bytewise):
    _, tokenizer = bytewise
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 77)
    (mask,) = grammars.masks([MaskRequest(matcher_of(grammars, {"json_object": True}))])
    assert mask.shape == (1, -(-(tokenizer.vocab_size + 77) // 32))
    assert max(allowed(grammars, matcher_of(grammars, {"regex": "[^x]+"}))[0]) < tokenizer.vocab_size
    grammars.close()


def test_a_tokenizer_without_an_end_token(bytewise):
    _, tokenizer = bytewise

    class Endless:
        eos_token_ids = frozenset()

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    grammars = Grammars(Endless(), tokenizer.vocab_size)
    matcher = matcher_of(grammars, {"choice": ["t", "th"]})
    matcher.accept(matcher_token(tokenizer, "t"))
    assert not matcher.is_complete
    assert allowed(grammars, matcher)[0] - {tokenizer.vocab_size} == {matcher_token(tokenizer, "h")}
    matcher.accept(matcher_token(tokenizer, "h"))
    assert matcher.is_complete
    with pytest.raises(InvalidRequest, match="allows no text"):
        matcher_of(grammars, {"grammar": 'start: ""'})
    grammars.close()


CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("wanted", [{"regex": r"[^\s\S]"}, {"json": CYCLE}])
def test_a_language_without_texts_is_said_to_be_one(bytewise, wanted):
    """The library has a word of its own for it, which says nothing to anybody."""
    _, tokenizer = bytewise
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    with pytest.raises(InvalidRequest, match="it allows no text"):
        grammars.compile(structured_outputs_from(wanted))
    grammars.close()


def test_the_trial_process_is_killed_and_comes_back(bytewise):
    _, tokenizer = bytewise
    trial = GrammarTrial(Vocabulary.of(tokenizer, tokenizer.vocab_size))
    assert trial.error('start: "a"') == ""
    first = trial._process.pid
    endless = lark_from(structured_outputs_from({"json": {"allOf": [{"pattern": f"a{{{i}}}b*"} for i in range(30)]}}))
    assert "processor time" in trial.error(endless)
    assert "expected" in trial.error("start: ((").lower()
    assert trial.error('start: "a"') == ""
    assert trial._process.pid != first
    process = trial._process
    trial.close()
    assert process.returncode is not None


def test_kept_by_content(bytewise):
    grammars, _ = bytewise
    first = matcher_of(grammars, {"choice": ["the", "then"]})
    first.accept(next(iter(allowed(grammars, first)[0])))
    again = matcher_of(grammars, {"choice": ["the", "then"]})
    assert allowed(grammars, again) != allowed(grammars, first)  # at its own start
    for i in range(200):
        matcher_of(grammars, {"choice": [f"the{i}"]})
    assert len(grammars._kept) == 128


def test_compiled_by_many_threads_at_once():
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)  # whose parts nobody has made yet
    found, failures = [], []

    def work(seed):
        try:
            for i in random.Random(seed).sample(range(12), 12):
                matcher = matcher_of(grammars, {"regex": f"[a-z]{{{i + 1}}}x"})
                found.append((i, matcher.num_allowed([matcher_token(tokenizer, "x")])))
        except Exception as error:  # the assertion below shows it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grammars.close()
    assert not failures and len(found) == 48 and {count for _, count in found} == {1}


def matcher_token(tokenizer, text):
    return next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == text.encode())


REFUSED = {
    "regex is wrong": {"regex": "(("},
    "look-around": {"regex": "(?=a)b"},
    "back-reference": {"regex": r"(a)\1"},
    "language is empty": {"regex": r"[^\s\S]"},
    "only the empty text": {"regex": "(|)"},
    "schema is false": {"json": {"not": {}}},
    "type is unknown": {"json": {"type": "text"}},
    "keyword cannot be kept": {"json": {"type": "array", "uniqueItems": True}},
    "format is unknown": {"json": {"type": "string", "format": "postcode"}},
    "lenient is not the stranger's": {"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}},
    "reference is missing": {"json": {"$ref": "#/$defs/a"}},
    "reference to itself": {"json": {"$ref": "#"}},
    "endless rule": {"grammar": "start: start"},
    "rule is missing": {"grammar": "start: other"},
    "GBNF is wrong": {"grammar": 'root ::= "a" (('},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, bytewise):
    with pytest.raises(InvalidRequest) as refused:
        matcher_of(bytewise[0], REFUSED[name])
    assert refused.value.param == "structured_outputs"
    assert "structured_outputs" in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("key", ["json", "grammar"])
def test_references_fetch_nothing(tmp_path, key, bytewise):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "integer"}')

        def log_message(self, *args): ...

    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for address in (f"http://127.0.0.1:{server.server_port}/schema.json", file.as_uri(), str(file)):
            schema = {"$ref": address}
            value = {"json": schema} if key == "json" else {"grammar": f"start: %json {json.dumps(schema)}"}
            with pytest.raises(InvalidRequest):
                matcher_of(bytewise[0], value)
        server.shutdown()
    assert asked == []


HOSTILE = {
    "repeats of repeats": {"regex": "(a{1,1000}){1,1000}"},
    "states without end": {"regex": "(.*x.{200}){5}"},
    "long alternatives": {"choice": [f"{'ab' * 50}{i}" for i in range(1000)]},
    "rules that double": {
        "grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), 'r40: "x"'])
    },
    "ambiguous": {"grammar": 'start: a\na: a a | "x" | a a a'},
    "deep recursion": {
        "json": {
            "$defs": {"n": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}, {"type": "null"}]}},
            "$ref": "#/$defs/n",
        }
    },
    "all at once": {"json": {"allOf": [{"properties": {f"p{i}": {"pattern": f"x{{{i}}}"}}} for i in range(200)]}},
    "large bounds": {"json": {"type": "array", "minItems": 100_000, "items": {"type": "string", "maxLength": 10**9}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_with_a_typed_error_or_an_answer(name, bytewise):
    """Each is refused, or walked for 200 tokens within the library's limits on work; nothing hangs or grows."""
    grammars, tokenizer = bytewise
    rng = random.Random(name)
    try:
        matcher = matcher_of(grammars, HOSTILE[name])
        for _ in range(200):
            (mask,) = grammars.masks([MaskRequest(matcher)])
            if isinstance(mask, LogitsError):
                raise mask
            bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
            choices = sorted(set(np.flatnonzero(bits).tolist()) - tokenizer.eos_token_ids)
            if not choices:
                break
            matcher.accept(rng.choice(choices))
            if matcher.is_complete:
                break
    except (InvalidRequest, LogitsError) as error:
        assert "structured_outputs" in str(error)


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.soak)])
def test_vocabularies_of_real_models(model, request):
    """Every token's bytes are known to the library, special tokens are out of reach, text keeps its tokens."""
    tokenizer = load_tokenizer(request.getfixturevalue(model))
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 3)
    matcher = matcher_of(grammars, {"regex": r"(.|\n)+"})
    (seen,) = allowed(grammars, matcher)
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        starts = _starts_text(data)
        assert (token_id in seen) == starts, (token_id, data)
    assert not any(token_id >= tokenizer.vocab_size for token_id in seen)
    text = '{"name": "Zoë 你好 🙂", "tags": ["a\\n", " b"],\n  "x": [1, 2.5e-3, null]}'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = matcher_of(grammars, {"regex": regex.escape(text, literal_spaces=True)})
    for token_id in token_ids:  # the text is forced, and its tokens are the tokenizer's
        assert allowed(grammars, matcher) == [{token_id}]
        matcher.accept(token_id)
    assert matcher.is_complete


def _starts_text(data: bytes) -> bool:
    """Whether bytes are the beginning of some UTF-8 text."""
    if not data:
        return False
    for length in range(4):
        try:
            data[: len(data) - length].decode()
        except UnicodeDecodeError:
            continue
        tail = data[len(data) - length :]
        return length == 0 or _is_beginning(tail)
    return False


def _is_beginning(tail: bytes) -> bool:
    """Whether some character begins with these bytes."""
    for first in (0x80, 0x800, 0x10000):
        size = len(chr(first).encode())
        if len(tail) >= size:
            continue
        for fill in (
            b"\x80\x80\x80",
            b"\xbf\xbf\xbf",
            b"\x90\x80\x80",
            b"\x8f\xbf\xbf",
            b"\xa0\x80\x80",
            b"\x9f\xbf\xbf",
        ):
            try:
                (tail + fill[: size - len(tail)]).decode()
            except UnicodeDecodeError:
                continue
            return True
    return False
