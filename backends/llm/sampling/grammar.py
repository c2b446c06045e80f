"""Grammars: which tokens keep an answer within its structured output, by the library llguidance.

    StructuredOutputs ── compile, kept by content ──> the grammar at its start ── copied ──> Matcher of one answer
                                                                                             accept(token), masks()

A token is allowed where the text with its bytes behind it can still become a text of the language; an end token where
the text is one. Special tokens have no bytes and are never allowed otherwise, unless a grammar names them. Where only
one text can follow, its tokens are those that the tokenizer makes of it: a model goes on better behind what it knows.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.llm.errors import GrammarError, InvalidRequest, LogitsError
from backends.llm.sampling.grammar_source import Vocabulary, lark_from, llguidance
from backends.llm.sampling.grammar_trial import GrammarTrial, compiled, error_of, library_tokenizer
from backends.llm.sampling.structured_outputs import StructuredOutputs
from backends.llm.tokenizers.base import Tokenizer

Mask = npt.NDArray[np.int32]

_MAX_KEPT = 128  # grammars


class Matcher:
    """How far one answer has come in its grammar. It follows the tokens of the answer and nothing else."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int], *, ignore_eos: bool) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self.ignore_eos = ignore_eos

    @property
    def library_matcher(self) -> Any:
        """The library's object, for masks of many at once."""
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """No text can follow: the answer ends here, whether the model says so or not."""
        return bool(self._matcher.is_stopped())

    def accept(self, token_id: int) -> None:
        """Takes note of the answer's next token.

        Raises:
            GrammarError: the token is not allowed, or the grammar needs more work than is allowed.
        """
        if not self._matcher.consume_token(token_id):
            raise _too_much(self._matcher)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the tokens, one after the other, the grammar allows; nothing is taken note of."""
        if self.ignore_eos:
            ends = [i for i, token_id in enumerate(token_ids) if token_id in self._eos_token_ids]
            token_ids = token_ids[: ends[0]] if ends else token_ids
        return int(self._matcher.validate_tokens(list(token_ids))) if token_ids else 0


class MaskRequest(NamedTuple):
    """One answer of a step: where it is, and the drafts that are to be judged."""

    matcher: Matcher
    draft_token_ids: Sequence[int] = ()


class Grammars:
    """The grammars of one model's vocabulary. `compile` is safe for threads, `masks` belongs to the engine's.

    Args:
        tokenizer: its bytes decide what a token is.
        vocab_size: of the model's logits; may be more than the tokenizer has.
        num_threads: for the masks of one step; None is half of the machine's. A mask takes some 12 us, so that on two
            cores waking another thread costs more than it gives.

    Attributes:
        num_masks, mask_seconds: rows of logits that were masked, and what their masks took.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, num_threads: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._num_threads = num_threads or len(os.sched_getaffinity(0)) // 2
        self._lock = threading.Lock()
        self._parts: _Parts | None = None
        self._kept: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self.num_masks = 0
        self.mask_seconds = 0.0

    def knows(self, wanted: StructuredOutputs) -> bool:
        """Returns whether a grammar is compiled already."""
        with self._lock:
            return wanted in self._kept

    def compile(self, wanted: StructuredOutputs, *, ignore_eos: bool = False) -> Matcher:
        """Returns a matcher at the start of its grammar; one that was compiled before costs a copy.

        Raises:
            InvalidRequest: the grammar is wrong, too large, not supported, or allows no text at all.
            EnvironmentLacks: the library is not installed.
        """
        with self._lock:
            kept = self._kept.get(wanted)
            if kept is not None:
                self._kept.move_to_end(wanted)
        if kept is None:
            kept = self._compile(wanted)
            with self._lock:
                self._kept[wanted] = kept
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return Matcher(kept.deep_copy(), self._eos_token_ids, ignore_eos=ignore_eos)

    def masks(self, requests: Sequence[MaskRequest]) -> list[Mask | LogitsError]:
        """Computes the masks of one step, of all its answers together.

        Returns:
            For each request [1 + drafts, ceil(vocab_size / 32)] int32 with a bit for each token that is allowed, or
            the error that ends it. Rows behind a draft token that is not allowed mean nothing: nobody gets there.
        """
        if not requests:
            return []
        started = time.perf_counter()
        parts = self._loaded()
        num_words = -(-int(parts.tokenizer.vocab_size) // 32)
        rows = np.zeros((sum(1 + len(r.draft_token_ids) for r in requests), num_words), dtype=np.int32)
        firsts = list(itertools.accumulate((1 + len(r.draft_token_ids) for r in requests[:-1]), initial=0))
        if parts.executor is None or len(requests) == 1:
            _fill(rows, requests, firsts)
        else:
            _fill_in_parallel(parts.executor, rows, requests, firsts)
        masks = [self._result(request, rows, first) for request, first in zip(requests, firsts, strict=True)]
        self.num_masks += len(rows)
        self.mask_seconds += time.perf_counter() - started
        return masks

    def _result(self, request: MaskRequest, rows: Mask, first: int) -> Mask | LogitsError:
        if request.matcher.library_matcher.is_error():  # the library allows the end token then
            return _too_much(request.matcher.library_matcher)
        mask = rows[first : first + 1 + len(request.draft_token_ids)]
        if request.matcher.ignore_eos:
            for token_id in self._eos_token_ids:
                mask.view(np.uint32)[:, token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        return mask

    def close(self) -> None:
        """Ends the process in which grammars are tried."""
        if self._parts is not None:
            self._parts.trial.close()

    def _compile(self, wanted: StructuredOutputs) -> Any:
        try:
            lark = lark_from(wanted)
        except ValueError as error:
            raise _refusal(wanted, str(error)) from None
        parts = self._loaded()
        wrong, matcher = parts.trial.error(lark), None
        if not wrong:
            matcher, wrong = compiled(parts.tokenizer, parts.vocabulary, lark)
        if wrong:
            raise _refusal(wanted, wrong)
        return matcher

    def _loaded(self) -> _Parts:
        with self._lock:
            if self._parts is None:
                vocabulary = Vocabulary.of(self._tokenizer, self._vocab_size)
                executor = llguidance().LLExecutor(self._num_threads) if self._num_threads > 1 else None
                self._parts = _Parts(vocabulary, library_tokenizer(vocabulary), executor, GrammarTrial(vocabulary))
            return self._parts


class _Parts(NamedTuple):
    """What is made with the first grammar, since most servers never see one."""

    vocabulary: Vocabulary
    tokenizer: Any
    executor: Any  # None where masks are made one after the other
    trial: GrammarTrial


def _fill(rows: Mask, requests: Sequence[MaskRequest], firsts: Sequence[int]) -> None:
    for (matcher, drafts), first in zip(requests, firsts, strict=True):
        address = rows[first].ctypes.data
        if drafts:
            matcher.library_matcher.unsafe_compute_mask_ptr_with_draft_token(address, rows[0].nbytes, list(drafts))
        else:
            matcher.library_matcher.unsafe_compute_mask_ptr(address, rows[0].nbytes)


def _fill_in_parallel(executor: Any, rows: Mask, requests: Sequence[MaskRequest], firsts: Sequence[int]) -> None:
    places = list(zip(requests, firsts, strict=True))
    plain = [(matcher.library_matcher, first) for (matcher, drafts), first in places if not drafts]
    drafted = [(matcher.library_matcher, first, list(drafts)) for (matcher, drafts), first in places if drafts]
    if plain:
        executor.unsafe_compute_mask_ptr(plain, rows.ctypes.data, rows[0].nbytes, len(rows))
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, rows.ctypes.data, rows[0].nbytes, len(rows))


def _refusal(wanted: StructuredOutputs, reason: str) -> InvalidRequest:
    what = {"json": "the JSON schema", "regex": "the regular expression", "choice": "the list of choices"}
    return InvalidRequest(
        f"{what.get(wanted.kind, 'the grammar')} of structured_outputs is not taken: {reason[:300]}",
        param="structured_outputs",
    )


def _too_much(matcher: Any) -> GrammarError:
    reason = error_of(matcher) or "the token is not allowed here"
    return GrammarError(f"structured_outputs: the answer cannot go on within its grammar: {reason[:300]}")
