"""Answer: the tokens of one answer on their way to the user, as text in pieces, with the reason why it ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backends.llm.engine.request import FinishReason
from backends.llm.sampling.detokenizer import Detokenizer
from backends.llm.sampling.logprobs import TokenLogprobs
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.stop import StopMatcher
from backends.llm.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request is charged with, in tokens; the output counts the stop token and every token behind the text.

    Attributes:
        num_cached_tokens: how many of the prompt's tokens came from the prefix cache.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class AnswerDelta(NamedTuple):
    """What one step adds to an answer.

    Attributes:
        text: what can leave now; all deltas together are `Answer.text`.
        token_ids: the tokens of this step that belong to the answer, fewer than were given where it ended before.
        logprobs: one for each of them where the request asks for them, else None.
        finish_reason: None while the answer goes on.
        stop_reason: the stop string or token of `stop_token_ids` that ended it; None for the model's own end tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Answer:
    """One answer: tokens in, text out. The scheduler ends it by tokens, this class by stop strings.

    Attributes:
        text: all that has left.
        token_ids: all tokens of the answer.
        logprobs: one for each token where the request asks for them, else None.
        cumulative_logprob: their sum.
        finish_reason, stop_reason: as in the last delta.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
        *,
        is_complete: bool = False,
    ) -> AnswerDelta:
        """Takes the tokens of one step.

        A stop string ends the answer with the token in which it is complete, whatever reason comes with later tokens.

        Args:
            token_ids: what the scheduler took of the sampled tokens.
            logprobs: as the sampler gives them, at least as many; None where none were asked for.
            finish_reason: why the last of the tokens is the answer's last, or None. With STOP it is a stop token, whose
                text is left out unless `include_stop_str_in_output`.
            is_complete: the answer's grammar ends with the last of the tokens, which is part of the text.
        """
        assert self.finish_reason is None, "an answer that ended gets no more tokens"
        pieces = []
        count = 0
        for token_id in token_ids:
            count += 1
            last = count == len(token_ids) and finish_reason is not None
            self.token_ids.append(token_id)
            if last and finish_reason is FinishReason.STOP:
                self.stop_reason = token_id if token_id in self._params.stop_token_ids else None
                if not self._params.include_stop_str_in_output:
                    break
            may_stop = len(self.token_ids) > self._params.min_tokens  # as the ban of stop tokens has it, and vLLM
            pieces.append(self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop))
            if self._stops.matched is not None:
                self.stop_reason = self._stops.matched
                finish_reason = FinishReason.STOP
                break
        if is_complete:
            finish_reason = FinishReason.STOP
        return self._delta(pieces, tuple(token_ids[:count]), self._take(logprobs, count), finish_reason)

    def finish(self, reason: FinishReason) -> AnswerDelta:
        """Ends the answer from outside: aborted, failed, too late. An answer that has ended already stays as it is."""
        if self.finish_reason is not None:
            return AnswerDelta("", (), None, self.finish_reason, self.stop_reason)
        return self._delta([], (), self._take((), 0), reason)

    def usage(self, num_prompt_tokens: int, num_cached_tokens: int) -> Usage:
        """Returns what the answer is charged with so far."""
        return Usage(num_prompt_tokens, num_cached_tokens, len(self.token_ids))

    def _take(self, logprobs: Sequence[TokenLogprobs] | None, count: int) -> tuple[TokenLogprobs, ...] | None:
        if self.logprobs is None or logprobs is None:
            return None
        taken = tuple(logprobs[:count])
        self.logprobs += taken
        self.cumulative_logprob += sum(entry.logprob for entry in taken)
        return taken

    def _delta(
        self,
        pieces: list[str],
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
    ) -> AnswerDelta:
        """Notes what leaves; at the end also what was held back and did not become a stop string."""
        if finish_reason is not None:
            self.finish_reason = finish_reason
            pieces.append(self._stops.flush())
            self._detokenizer.finish()
        text = "".join(pieces)
        if text:
            self._pieces.append(text)
        return AnswerDelta(text, token_ids, logprobs, finish_reason, self.stop_reason)
