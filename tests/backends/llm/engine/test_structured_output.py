"""Structured output in the engine: with every way to sample, batched, preempted, with drafts, the language is kept."""

from __future__ import annotations

import dataclasses
import json
import re

import jsonschema
import numpy as np
import pytest

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.outputs import ModelRunnerOutput
from backends.llm.errors import InvalidRequest
from backends.llm.sampling.logprobs import token_logprobs
from tests.backends.llm.engine.toy import ToyRunner
from tests.backends.llm.sampling.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
VOCAB = TOKENIZER.vocab_size
(EOS,) = TOKENIZER.eos_token_ids
TEXT = {"type": "string", "maxLength": 6}
SCHEMAS = {
    "enum": {"enum": ["red", "grün", 7, None, {"a": [1, 2]}, 'quote " and \\']},
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
            "ok": {"type": "boolean"},
        },
        "required": ["who", "ok"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "null"}], "items": False, "minItems": 2},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{1,3}-[0-9]{2}$"},
    "unicode": {
        "type": "object",
        "properties": {"größe 你好": {"enum": ["🙂", "é", "\u2028"]}},
        "required": ["größe 你好"],
        "additionalProperties": False,
    },
    "anyOf": {
        "anyOf": [
            {"type": "integer", "minimum": 10, "maximum": 99},
            {"type": "string", "pattern": "^x{2,4}$"},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        ]
    },
    "recursion": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"enum": [1, 2]},
                    "c": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "map": {
        "type": "object",
        "patternProperties": {"^[a-c]{1,2}$": {"type": "integer", "minimum": 0, "maximum": 9}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "number": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
    "date": {"type": "string", "format": "date"},
    "const": {"const": {"a": [True, None]}},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
            {"properties": {"b": {"enum": ["x"]}}, "required": ["b"], "additionalProperties": True},
        ],
        "maxProperties": 2,
    },
}
PATTERNS = [r"[a-z]{3,6}", r"\d{4}-\d{2}", r"(yes|no|maybe)( indeed)?", r"[^\"\n]{2,5}!", r"(a|ab)*c", r"\w\W\s"]
CHOICES = ["the", "then", "there", "thé", 'x " \\ \n y', "🙂"]
WILD = {"temperature": 1.5, "max_tokens": 200}


class RandomRunner(ToyRunner):
    """A model with random weights: its logits are random, by the whole context, which is read from the cache."""

    vocab_size = VOCAB

    def execute(self, output):
        for r in output.requests:
            for position, token_id in enumerate(r.token_ids, start=r.num_computed_tokens):
                self.cache[r.block_ids[position // self.block_size], position % self.block_size] = token_id
        rows = []
        for r in output.requests:
            end = r.num_computed_tokens + len(r.token_ids)
            context = self.cache[list(r.block_ids)].reshape(-1)[:end]
            for position in range(end - r.num_logits, end):
                rows.append(self.logits(context[: position + 1]))
        return ModelRunnerOutput(np.array(rows, dtype=np.float32).reshape(len(rows), VOCAB))

    @staticmethod
    def logits(context):
        rng = np.random.default_rng([int(token_id) for token_id in context])
        return (2 * rng.standard_normal(VOCAB)).astype(np.float32)


def make_engine(num_blocks=512, num_draft_tokens=0, **config):
    config = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 256, **config}
    return LLMEngine(
        RandomRunner(num_blocks, 4), TOKENIZER, SchedulerConfig(**config), num_draft_tokens=num_draft_tokens
    )


@pytest.fixture(scope="module")
def engine():
    engine = make_engine()
    yield engine
    engine.close()


def answer(engine, value, prompt=(3, 4, 5), **params):
    (result,) = engine.generate([list(prompt)], SamplingParams(structured_outputs=value, **params), progress=False)
    return result.outputs[0]


def answers(engine, requests, seeds):
    """The answers of many requests at once: (structured output, further parameters)."""
    params = [SamplingParams(structured_outputs=v, **p, seed=s) for v, p in requests for s in seeds]
    results = engine.generate([[3, 4, 5]] * len(params), params, progress=False)
    return [result.outputs[0] for result in results]


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_validates(engine, name):
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    greedy = {"max_tokens": 200}
    sharp = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "max_tokens": 200}
    outputs = answers(
        engine, [({"json": schema}, WILD), ({"json": schema}, sharp), ({"json": schema}, greedy)], range(4)
    )
    for output in outputs:
        assert (output.finish_reason, output.error) == ("stop", "")
        validator.validate(json.loads(output.text))
    assert len({output.text for output in outputs}) > 1 or name == "const"


def test_answers_of_free_schemas_are_json_or_its_beginning(engine):
    values = [{"json_object": True}, {"json": {}}, {"json": {"type": "array"}}]
    outputs = answers(engine, [(v, {"temperature": 1.5, "max_tokens": 80}) for v in values], range(6))
    for output, value in zip(outputs, [v for v in values for _ in range(6)], strict=True):
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict if "json_object" in value else object)
        else:
            assert output.finish_reason == "length"
            assert_beginning(engine, value, output)


def assert_beginning(engine, value, output):
    """The tokens are a way into the language."""
    params = SamplingParams(structured_outputs=value)
    matcher = engine._grammars.compile(params.structured_outputs)
    assert matcher.num_allowed(list(output.token_ids)) == len(output.token_ids)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regular_expressions_match(engine, pattern):
    for output in answers(engine, [({"regex": pattern}, WILD), ({"regex": pattern}, {"max_tokens": 200})], range(6)):
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text), output.text


def test_choices_are_of_the_list(engine):
    outputs = answers(engine, [({"choice": CHOICES}, WILD)], range(30))
    assert {output.text for output in outputs} <= set(CHOICES)
    assert len({output.text for output in outputs}) >= 3


def test_grammars_in_lark_and_gbnf(engine):
    lark = 'start: expr\nexpr: term (" + " term)*\nterm: /[0-9]{1,2}/ | "(" expr ")"'
    gbnf = 'root ::= ("ab" | "cd")+ "."'
    outputs = answers(engine, [({"grammar": lark}, WILD), ({"grammar": gbnf}, WILD)], range(5))
    for output in outputs[:5]:
        if output.finish_reason == "stop":
            assert re.fullmatch(r"[0-9()+ ]+", output.text)
            eval(output.text)  # an expression of numbers, or a SyntaxError
        else:
            assert_beginning(engine, {"grammar": lark}, output)
    assert all(re.fullmatch(r"(ab|cd)+\.", o.text) for o in outputs[5:] if o.finish_reason == "stop")


def test_greedy_is_the_plain_way(engine):
    """The oracle: of the tokens whose bytes keep the text a beginning of the language, the one with the best logit."""
    import regex

    for pattern in (r"[a-e]{2,7}x", r"the(n|re)? [a-z ]{1,4}", r"\[[0-9, ]{1,9}\]"):
        for prompt in ([7, 8], [9, 10, 11]):
            text, token_ids = "", []
            while True:
                row = RandomRunner.logits(prompt + token_ids)
                fits = [t for t in range(VOCAB) if _fits(regex, pattern, text, t)]
                can_end = bool(regex.fullmatch(pattern, text))
                if can_end and not fits:
                    break
                best = max([*fits, EOS] if can_end else fits, key=lambda t: (row[t], -t))
                token_ids.append(best)
                if best == EOS:
                    break
                text += TOKENIZER.token_bytes(best).decode()
            free = {"grammar": '%llguidance {"no_forcing": true}\nstart: /' + pattern + "/"}
            output = answer(engine, free, prompt, max_tokens=100)
            assert (output.text, list(output.token_ids)) == (text, token_ids)


def _fits(regex, pattern, text, token_id):
    data = TOKENIZER.token_bytes(token_id)
    return bool(data) and data.isascii() and bool(regex.fullmatch(pattern, text + data.decode(), partial=True))


def test_cut_off_is_a_valid_beginning(engine):
    value = {"json": SCHEMAS["nested"]}
    whole = answer(engine, value, max_tokens=200, temperature=1.0, seed=1)
    for count in (1, 2, 7, len(whole.token_ids) - 1):
        cut = answer(engine, value, max_tokens=count, temperature=1.0, seed=1)
        assert cut.finish_reason == "length"
        assert cut.token_ids == whole.token_ids[:count]
        assert whole.text.startswith(cut.text.replace("\ufffd", ""))
    exact = answer(engine, value, max_tokens=len(whole.token_ids), temperature=1.0, seed=1)
    assert (exact.finish_reason, exact.text) == ("stop", whole.text)


def test_the_same_alone_in_a_batch_and_preempted():
    values = [{"json": SCHEMAS["nested"]}, {"regex": r"[a-z ]{20,40}\."}, None, {"json": SCHEMAS["recursion"]}] * 3
    params = [
        SamplingParams(structured_outputs=v, temperature=1.2, top_p=0.95, seed=i, max_tokens=60)
        for i, v in enumerate(values)
    ]
    prompts = [[i, i + 1, i + 2] for i in range(len(params))]

    def run(engine, one_by_one=False):
        if one_by_one:
            return [engine.generate([p], s, progress=False)[0].outputs[0] for p, s in zip(prompts, params, strict=True)]
        return [r.outputs[0] for r in engine.generate(prompts, params, progress=False)]

    whole = make_engine()
    alone = run(whole, one_by_one=True)
    assert run(whole) == alone
    small = make_engine(num_blocks=40, max_model_len=128)
    assert run(small) == alone
    assert small.stats().scheduler.num_preemptions > 0
    assert small.stats().scheduler.num_free_blocks == 40
    for engine in (whole, small):
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(temperature):
    """Text that repeats its prompt, so that prompt lookup proposes; what it proposes is not always allowed."""
    names = TOKENIZER.encode("the then there the then there the then")
    schema = {
        "type": "array",
        "items": {"enum": ["the then there", "the then", "there there"]},
        "minItems": 3,
        "maxItems": 6,
    }
    values = [{"json": schema}, {"regex": "(the |then |there ){6,20}x"}, {"json": SCHEMAS["nested"]}]
    params = [
        SamplingParams(structured_outputs=v, temperature=temperature, seed=s, max_tokens=80, ignore_eos=s == 2)
        for v in values
        for s in range(3)
    ]
    plain, drafting = make_engine(), make_engine(num_draft_tokens=4)
    drafting._speculator.controller.plan = lambda ids: dict.fromkeys(ids, 4)  # whatever this machine's times say
    expected = [r.outputs for r in plain.generate([names] * len(params), params, progress=False)]
    seen = [r.outputs for r in drafting.generate([names] * len(params), params, progress=False)]
    assert seen == expected
    assert drafting.stats().num_accepted_tokens > 0
    assert drafting.stats().num_steps < plain.stats().num_steps
    for engine in (plain, drafting):
        engine.close()


class Liar:
    """Proposes tokens that no grammar here allows, behind one that may be."""

    def add(self, request_id, prompt): ...

    def append(self, request_id, token_ids): ...

    def remove(self, request_id): ...

    def close(self): ...

    def propose(self, num_drafts):
        from backends.llm.sampling.proposer import Draft

        return {i: Draft((ord("t") % VOCAB, EOS, EOS)) if n else Draft(()) for i, n in num_drafts.items()}


def test_rejected_drafts_do_not_advance_the_grammar():
    plain, lying = make_engine(), make_engine(num_draft_tokens=3)
    lying._speculator.controller.plan = lambda ids: dict.fromkeys(ids, 3)
    lying._speculator._proposer = Liar()
    for seed in range(4):
        value = {"json": SCHEMAS["nested"]}
        expected = answer(plain, value, temperature=1.0, seed=seed, max_tokens=100)
        assert answer(lying, value, temperature=1.0, seed=seed, max_tokens=100) == expected
    for engine in (plain, lying):
        engine.close()


def test_n_answers_have_a_grammar_each(engine):
    params = SamplingParams(structured_outputs={"json": SCHEMAS["nested"]}, n=5, **WILD, seed=3)
    (result,) = engine.generate([[1, 2]], params, progress=False)
    for index, output in enumerate(result.outputs):
        jsonschema.validate(json.loads(output.text), SCHEMAS["nested"])
        one = dataclasses.replace(params, n=index + 1)
        assert engine.generate([[1, 2]], one, progress=False)[0].outputs[index].token_ids == output.token_ids
    assert len({output.text for output in result.outputs}) == 5


def test_other_parameters_act_within_the_language(engine):
    value = {"regex": "[a-z]{1,30}"}
    biased = answer(engine, value, max_tokens=50, logit_bias={TOKENIZER.encode("q")[0]: 100.0, EOS: -100.0})
    assert set(biased.text) == {"q"} and len(biased.text) == 30
    assert answer(engine, {"regex": "[a-p]{3}"}, logit_bias={TOKENIZER.encode("q")[0]: 100.0}).text.isalpha()
    longer = answer(engine, value, min_tokens=12, temperature=1.0, seed=1, max_tokens=50, logit_bias={EOS: 50.0})
    assert len(longer.token_ids) == 13 and longer.token_ids[-1] == EOS
    penalised = answer(
        engine, value, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=100.0, max_tokens=20
    )
    assert re.fullmatch(value["regex"], penalised.text)


def test_min_tokens_cannot_lengthen_a_grammar_that_is_complete(engine):
    output = answer(engine, {"choice": ["the"]}, min_tokens=20, max_tokens=30)
    assert (output.text, output.finish_reason) == ("the", "stop")


def test_stop_strings_end_it_earlier(engine):
    output = answer(engine, {"regex": "[ab]{5}x[ab]{5}"}, stop=("x",), max_tokens=50)
    assert re.fullmatch("[ab]{5}", output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", "x")


def test_ignore_eos_goes_on_until_the_grammar_ends(engine):
    for seed in range(4):
        output = answer(engine, {"regex": "[ab]{1,9}"}, ignore_eos=True, temperature=1.0, seed=seed, max_tokens=50)
        assert (len(output.text), output.finish_reason) == (9, "stop")


def test_log_probabilities_are_the_models_own(engine):
    output = answer(engine, {"choice": ["the", "then"]}, logprobs=2)
    context = [3, 4, 5]
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry == token_logprobs(RandomRunner.logits(context), token_id, 2)
        context.append(token_id)


def test_a_grammar_that_fails_on_its_way_ends_that_answer_alone(engine):
    """States without end: the library's limit is reached in the middle."""
    bad = SamplingParams(structured_outputs={"regex": "(a{1,1000}){1,1000}"}, max_tokens=200, ignore_eos=True)
    good = SamplingParams(structured_outputs={"json": SCHEMAS["nested"]}, max_tokens=200, temperature=1.0, seed=1)
    expected = engine.generate([[5, 6]], good, progress=False)[0].outputs
    before = engine.stats().scheduler.num_free_blocks
    failed, fine = engine.generate([[3, 4], [5, 6]], [bad, good], progress=False)
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].error.startswith("structured_outputs: the answer cannot go on within its grammar")
    assert fine.outputs == expected
    assert engine.stats().scheduler.num_free_blocks == before


def test_a_grammar_that_is_not_taken_leaves_nothing_behind(engine):
    for value in ({"regex": "(("}, {"json": {"uniqueItems": True}}):
        params = SamplingParams(structured_outputs=value)
        for take in (lambda p: engine.add_request("x", [1], p), engine.compile_grammar):
            with pytest.raises(InvalidRequest, match="structured_outputs is not taken") as refused:
                take(params)
            assert refused.value.param == "structured_outputs"
    assert not engine.has_requests


def test_masks_and_their_time_are_counted():
    engine = make_engine()
    engine.generate([[1]], SamplingParams(max_tokens=5), progress=False)
    assert (engine.stats().num_masks, engine.stats().mask_seconds) == (0, 0.0)
    output = answer(engine, {"regex": "[ab]{8}"}, max_tokens=20)
    assert engine.stats().num_masks == len(output.token_ids)
    assert engine.stats().mask_seconds > 0
    engine.close()


def test_a_token_out_of_the_language_is_seen():
    """The grammar checks what the masks let through: with masks that allow everything the answer fails."""
    engine = make_engine()
    masks = engine._grammars.masks
    engine._grammars.masks = lambda requests: [np.full_like(mask, -1) for mask in masks(requests)]
    output = answer(engine, {"json": SCHEMAS["nested"]}, temperature=1.5, max_tokens=20, seed=1)
    assert output.finish_reason == "error" and "structured_outputs" in output.error
    engine.close()
