"""Whether a model runner computes the model: its logits against those of the plain torch decoder in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request
from backends.llm.engine.scheduler import Scheduler
from backends.llm.loaders.base import LoadedModel
from backends.llm.models.weights import values
from backends.llm.runners.base import ModelRunner
from backends.llm.tokenizers.base import Tokenizer
from compiler.errors import ModelRefused

Logits = npt.NDArray[np.float32]  # [num_tokens, vocab_size]

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "In 1969 the first message between two computers was sent; it was cut after two letters, L and O, when one of "
    "them went down. An hour later the whole word came through.",
    "Prix : 12,50 €; 東京は日本の首都です。 Привет, мир!",
)
MAX_TEXT_TOKENS = 96  # a multiple of 16
STEP_TOKENS = 24  # a step mixes chunks of several texts, and none is computed at once


@dataclass(frozen=True)
class LogitsTolerance:
    """How far the logits may be from the reference.

    Attributes:
        nmse: mean over positions of sum((x - reference) ** 2) / sum((reference - mean) ** 2).
        agreement: share of positions whose most likely token is the reference's.
    """

    nmse: float
    agreement: float


EXACT = LogitsTolerance(nmse=1e-8, agreement=1.0)
# bf16 products and 8-bit activations: 1.1e-2 on SmolLM2, which is 0.6% of perplexity (docs/measured.md), with room.
FAST = LogitsTolerance(nmse=2e-2, agreement=0.9)


@dataclass(frozen=True)
class LogitsReport:
    """The comparison, and what is wrong with it or an empty string."""

    num_positions: int
    nmse: float
    max_abs: float
    agreement: float
    problem: str

    def to_json(self) -> dict[str, Any]:
        return {
            "num_positions": self.num_positions,
            "nmse": self.nmse,
            "max_abs": self.max_abs,
            "agreement": self.agreement,
            "problem": self.problem,
        }


def judged_prompts(tokenizer: Tokenizer, runner: ModelRunner, max_model_len: int) -> list[list[int]]:
    """Returns the token ids on which a runner is judged.

    Raises:
        ModelRefused: the tokenizer is another model's, or a prompt with an answer has no room.
    """
    room = min(max_model_len, runner.num_blocks * runner.block_size)
    if room < 2:
        raise ModelRefused(f"the context has room for {room} tokens; at least 2 are needed, a prompt and an answer")
    prompts = [ids[: min(MAX_TEXT_TOKENS, room - 1)] for text in TEXTS if (ids := tokenizer.encode(text))]
    largest = max(map(max, prompts))
    if largest >= runner.vocab_size:
        raise ModelRefused(
            f"the tokenizer makes token {largest} of plain text, and the model's vocabulary ends at "
            f"{runner.vocab_size - 1}",
            hint="the tokenizer is another model's; use the one that the model was trained with",
        )
    return prompts


def reference_logits(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> list[Logits]:
    """Returns the logits of every position by the plain decoder in float32, one prompt at a time and whole.

    Raises:
        ModelRefused: they are not finite, or say nothing: no runner can be judged by them.
    """
    from backends.llm.runners.torch_runner import TorchRunner

    # Room for the longest text and the one token of an answer that the scheduler reckons with.
    runner = TorchRunner(model, num_blocks=MAX_TEXT_TOKENS // 16 + 1, block_size=16)
    logits = [_logits(runner, [prompt], MAX_TEXT_TOKENS)[0] for prompt in prompts]
    if not all(np.isfinite(rows).all() for rows in logits):
        broken = [name for name, weight in model.weights.items() if not np.isfinite(values(weight)).all()]
        seen = f"NaN or infinity stands in {', '.join(broken[:3])}" if broken else "no weight is NaN or infinity"
        raise ModelRefused(f"the plain decoder's own logits are not finite: {seen}", hint="the model itself is broken")
    if any((np.ptp(rows, axis=1) == 0).any() for rows in logits):
        raise ModelRefused(
            "the plain decoder's own logits are the same for all tokens", hint="the model's weights are empty"
        )
    return logits


def runner_logits(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], on_step: Callable[[int], None] = lambda done: None
) -> list[Logits]:
    """Returns the logits of every position as the engine would have them computed: paged, in chunks, mixed."""
    return _logits(runner, prompts, STEP_TOKENS, on_step)


def compare_logits(found: Sequence[Logits], references: Sequence[Logits], tolerance: LogitsTolerance) -> LogitsReport:
    """Compares position by position.

    Any number that is not finite is a failure, whatever the tolerance.
    """
    ours, theirs = np.concatenate(found).astype(np.float64), np.concatenate(references).astype(np.float64)
    if not np.isfinite(ours).all():
        return LogitsReport(len(ours), np.inf, np.inf, 0.0, f"{int((~np.isfinite(ours)).sum())} logits are not finite")
    spread = ((theirs - theirs.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        nmse = float((((ours - theirs) ** 2).sum(axis=1) / spread).mean())
    agreement = float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
    problems = []
    if not nmse <= tolerance.nmse:  # NaN fails too
        problems.append(f"the normalised mean square error is {nmse:.2e}, {tolerance.nmse:.0e} is allowed")
    if agreement < tolerance.agreement:
        problems.append(f"the most likely token agrees in {agreement:.1%}, {tolerance.agreement:.0%} is needed")
    return LogitsReport(len(ours), nmse, float(np.abs(ours - theirs).max()), agreement, "; ".join(problems))


def _logits(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    step_tokens: int,
    on_step: Callable[[int], None] = lambda done: None,
) -> list[Logits]:
    """Runs prompts through the engine's own scheduler and keeps the logits of all their tokens."""
    config = SchedulerConfig(
        max_num_seqs=min(len(prompts), step_tokens),
        max_num_batched_tokens=step_tokens,
        max_model_len=runner.max_model_len,
        enable_prefix_cache=False,
    )
    scheduler = Scheduler(config, KVCacheManager(runner.num_blocks, runner.block_size))
    for index, prompt in enumerate(prompts):
        scheduler.add_request(Request(RequestId(str(index)), tuple(prompt), 1, index, wants_prompt_logits=True))
    kept: list[list[Logits]] = [[] for _ in prompts]
    done = 0
    while scheduler.has_requests:
        output = scheduler.schedule()
        logits = runner.execute(output).logits
        first = 0
        sampled = {}
        for scheduled in output.requests:
            index = int(scheduled.request_id)
            kept[index].append(logits[first : first + scheduled.num_logits].copy())
            first += scheduled.num_logits
            if scheduled.num_computed_tokens + len(scheduled.token_ids) == len(prompts[index]):
                sampled[scheduled.request_id] = (0,)
        scheduler.update_from_output(output, sampled)
        done += output.num_tokens
        on_step(done)
    return [np.concatenate(rows) for rows in kept]
