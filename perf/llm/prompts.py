"""The requests of a load: prompts that no cache has seen, but for the prefixes that are shared on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from perf.errors import UsageError
from perf.llm.lengths import LONGEST, Lengths

PROMPT_KINDS = ("tokens", "text", "chat")
# Every usual vocabulary has these, and special tokens lie outside.
TOKEN_IDS = (1000, 30_000)
INPUT_LENGTHS, OUTPUT_LENGTHS = Lengths("fixed", 128), Lengths("fixed", 64)

Prompt = tuple[int, ...] | str


@dataclass(frozen=True)
class SharedPrefix:
    """`share` of the requests begin with one of `count` prefixes of `length` tokens, chosen by chance."""

    length: int
    share: float
    count: int = 1

    def __str__(self) -> str:
        return f"{self.share:.0%} after one of {self.count} shared prefixes of {self.length}"


@dataclass(frozen=True)
class PromptOptions:
    """What is asked.

    Attributes:
        kind: "tokens": ids; "text": words, one for each token asked for; "chat": the same as a user's message.
        input_lengths: of a prompt, without a shared prefix.
        output_lengths: the answer's; exact where `ignore_eos`, else at most.
        prefix: None for none.
        token_ids: prompts are drawn from [low, high).
        seed: the same seed gives the same requests.
    """

    kind: str = "tokens"
    input_lengths: Lengths = INPUT_LENGTHS
    output_lengths: Lengths = OUTPUT_LENGTHS
    prefix: SharedPrefix | None = None
    token_ids: tuple[int, int] = TOKEN_IDS
    ignore_eos: bool = True
    seed: int = 0

    def __str__(self) -> str:
        unit = "token ids" if self.kind == "tokens" else f"words as {self.kind}"
        prefix = f", {self.prefix}" if self.prefix else ""
        answer = "output tokens" if self.ignore_eos else "output tokens at most"
        return f"prompts of {self.input_lengths} {unit}{prefix}, {self.output_lengths} {answer}, seed {self.seed}"


@dataclass(frozen=True)
class LlmRequest:
    """One prompt, and how many tokens are wanted for it."""

    prompt: Prompt
    max_tokens: int


def make_requests(options: PromptOptions) -> Iterator[LlmRequest]:
    """Requests without end. No two prompts are alike: a prefix cache must not answer for the model."""
    rng = np.random.default_rng(options.seed)
    draw = _draw_tokens if options.kind == "tokens" else _draw_words
    prefix = options.prefix
    prefixes = [draw(options, prefix.length, rng) for _ in range(prefix.count)] if prefix else []
    number = 0
    while True:
        parts = draw(options, options.input_lengths.draw(rng), rng)
        if options.kind != "tokens":
            parts[0] = f"{options.seed}.{number}"  # text goes round: its first word tells prompts apart
        if prefix and rng.random() < prefix.share:
            parts = prefixes[rng.integers(len(prefixes))] + parts
        max_tokens = options.output_lengths.draw(rng)
        prompt: Prompt = tuple(map(int, parts)) if options.kind == "tokens" else " ".join(map(str, parts))
        yield LlmRequest(prompt, max_tokens)
        number += 1


def _draw_tokens(options: PromptOptions, count: int, rng: np.random.Generator) -> list[int | str]:
    return list(rng.integers(*options.token_ids, size=count).tolist())


def _draw_words(options: PromptOptions, count: int, rng: np.random.Generator) -> list[int | str]:
    words = _words()
    start = int(rng.integers(len(words)))
    return [words[(start + offset) % len(words)] for offset in range(count)]


@cache
def _words() -> list[str]:
    return (Path(__file__).parent / "text.txt").read_text("utf-8").split()


def parse_shared_prefix(text: str) -> SharedPrefix:
    """A shared prefix from LENGTH:SHARE or LENGTH:SHARE:COUNT.

    Raises:
        UsageError: it cannot be read or makes no sense.
    """
    wanted = "LENGTH:SHARE[:COUNT], as in 512:0.5 (half of the prompts) or 512:0.5:4 (four different ones)"
    parts = text.split(":")
    try:
        length, share, count = int(parts[0]), float(parts[1]), int(parts[2]) if len(parts) > 2 else 1
    except (ValueError, IndexError) as error:
        raise UsageError(f"--shared-prefix is {text!r}; allowed: {wanted}") from error
    if len(parts) > 3 or not (1 <= length <= LONGEST and 0 < share <= 1 and 1 <= count <= 10_000):
        raise UsageError(f"--shared-prefix is {text!r}, which is out of range; allowed: {wanted}")
    return SharedPrefix(length, share, count)


def parse_token_ids(text: str) -> tuple[int, int]:
    """The ids that prompts are drawn from, from LOW:HIGH; HIGH is not one of them.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high)
    except ValueError as error:
        raise UsageError(f"--token-ids is {text!r}; allowed: LOW:HIGH, as in 1000:30000") from error
    if not 0 <= found[0] < found[1] < 2**31:
        raise UsageError(f"--token-ids is {text!r}; allowed: 0 or more for LOW, more for HIGH")
    return found
