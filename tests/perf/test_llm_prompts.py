"""Lengths and prompts: what is drawn, and what is refused."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from perf.errors import UsageError
from perf.llm.lengths import Lengths, parse_lengths
from perf.llm.prompts import (
    LlmRequest,
    PromptOptions,
    SharedPrefix,
    make_requests,
    parse_shared_prefix,
    parse_token_ids,
)


def take(count: int, options: PromptOptions) -> list[LlmRequest]:
    return list(islice(make_requests(options), count))


def test_lengths_are_of_their_distribution() -> None:
    rng = np.random.default_rng(0)
    assert {Lengths("fixed", 7).draw(rng) for _ in range(10)} == {7}
    uniform = [Lengths("uniform", 3, 6).draw(rng) for _ in range(400)]
    assert set(uniform) == {3, 4, 5, 6}
    drawn = np.array([Lengths("lognormal", 200, 80).draw(rng) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(200, rel=0.02) and drawn.std() == pytest.approx(80, rel=0.05)
    # The median of a lognormal is below its mean: mean / sqrt(1 + (sd / mean)^2).
    assert np.median(drawn) == pytest.approx(200 / np.sqrt(1.16), rel=0.02)
    assert min(Lengths("lognormal", 1, 50).draw(rng) for _ in range(100)) == 1


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Lengths("fixed", 128)),
        ("fixed:128", Lengths("fixed", 128)),
        ("uniform:16:256", Lengths("uniform", 16, 256)),
        ("lognormal:200:0.5", Lengths("lognormal", 200, 0.5)),
    ],
)
def test_lengths_as_text(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--input-tokens") == lengths


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "allowed: N, uniform"),
        ("0", "1 to 1,000,000"),
        ("-3", "1 to 1,000,000"),
        ("2.5", "whole numbers"),
        ("nan", "1 to 1,000,000"),
        ("1e9", "1 to 1,000,000"),
        ("normal:3:4", "allowed: N, uniform"),
        ("uniform:3", "allowed: N, uniform"),
        ("uniform:9:3", "goes down"),
        ("uniform:a:3", "not a number"),
        ("lognormal:9:0", "above 0"),
        ("lognormal:9:nan", "above 0"),
        ("1:2:3:4", "allowed: N, uniform"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as refusal:
        parse_lengths(text, "--output-tokens")
    assert "--output-tokens" in str(refusal.value)


def test_token_prompts_have_exactly_the_length_asked_for() -> None:
    requests = take(50, PromptOptions(input_lengths=Lengths("uniform", 5, 9), token_ids=(100, 110)))
    assert {len(request.prompt) for request in requests} == {5, 6, 7, 8, 9}
    assert {token for request in requests for token in request.prompt} == set(range(100, 110))
    assert {request.max_tokens for request in requests} == {64}


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    options = PromptOptions(input_lengths=Lengths("fixed", 8), prefix=SharedPrefix(32, 0.5, 2))
    prompts = [request.prompt for request in take(400, options)]
    with_prefix = [prompt for prompt in prompts if len(prompt) == 40]
    assert 150 < len(with_prefix) < 250 and all(len(prompt) in (8, 40) for prompt in prompts)
    assert len({prompt[:32] for prompt in with_prefix}) == 2
    assert len({prompt[-8:] for prompt in prompts}) == 400


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_text_prompts_differ_from_their_first_word(kind: str) -> None:
    prompts = [request.prompt for request in take(30, PromptOptions(kind=kind, input_lengths=Lengths("fixed", 600)))]
    assert all(isinstance(prompt, str) and len(prompt.split()) == 600 for prompt in prompts)
    assert len({str(prompt).split()[0] for prompt in prompts}) == 30


def test_the_seed_decides() -> None:
    options = PromptOptions(input_lengths=Lengths("uniform", 1, 50), prefix=SharedPrefix(9, 0.3, 3))
    assert take(20, options) == take(20, options)
    assert take(20, options) != take(20, PromptOptions(input_lengths=Lengths("uniform", 1, 50), seed=1))


def test_shared_prefixes_as_text() -> None:
    assert parse_shared_prefix("512:0.5") == SharedPrefix(512, 0.5, 1)
    assert parse_shared_prefix("512:1:4") == SharedPrefix(512, 1.0, 4)
    for text in ("", "512", "512:0", "512:1.5", "512:nan", "0:1", "512:0.5:0", "512:0.5:4:1", "a:b"):
        with pytest.raises(UsageError, match="LENGTH:SHARE"):
            parse_shared_prefix(text)


def test_token_ids_as_text() -> None:
    assert parse_token_ids("0:5") == (0, 5)
    for text in ("", "5", "5:5", "-1:5", "a:b", "0:2147483648"):
        with pytest.raises(UsageError, match="--token-ids"):
            parse_token_ids(text)
