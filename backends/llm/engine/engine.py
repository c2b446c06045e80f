"""LLMEngine: prompts in, answers out. One step is schedule, execute, sample, update; nothing runs between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.llm.engine.admission import earliest_finish_s
from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import BlockId, RequestId, RequestUpdate, ScheduledRequest, SchedulerOutput
from backends.llm.engine.request import FinishReason, Request
from backends.llm.engine.results import EngineStats, GenerateOutput, StepOutput
from backends.llm.engine.scheduler import Scheduler
from backends.llm.engine.sequences import Group
from backends.llm.engine.sequences import Sequence as AnswerSequence
from backends.llm.engine.speculator import Speculator
from backends.llm.engine.step_sampling import sample_step
from backends.llm.errors import InvalidRequest, RequestRefused
from backends.llm.runners.base import ModelRunner
from backends.llm.sampling.answer import Answer, AnswerDelta
from backends.llm.sampling.grammar import Grammars
from backends.llm.sampling.ngram import NgramProposer
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import Proposer
from backends.llm.sampling.randomness import seed_from_request_id
from backends.llm.sampling.sampler import Sampled
from backends.llm.sampling.state import SamplerState
from backends.llm.sampling.step_times import StepTimes
from backends.llm.tokenizers.base import Tokenizer

Prompt = str | Sequence[int]


class LLMEngine:
    """Serves many requests at once over one model.

    Not safe for threads: one thread calls it. `LLMEngine.load` makes one from files.

    Args:
        runner: the model and the paged cache; the engine closes it.
        tokenizer: of the model.
        config: the scheduler's limits; `max_model_len` is cut to what the model and the cache have.
        num_draft_tokens: what may be proposed for one request in one step, where it pays; 0 is off.
        proposer: who proposes, closed by the engine; None is prompt lookup.
        clock_ns: a monotonic clock, for deadlines.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        *,
        num_draft_tokens: int = 0,
        proposer: Proposer | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        config = replace(config, max_model_len=min(config.max_model_len, runner.max_model_len))
        self.tokenizer = tokenizer
        self._runner = runner
        self._clock_ns = clock_ns
        kv_cache = KVCacheManager(runner.num_blocks, runner.block_size, enable_prefix_cache=config.enable_prefix_cache)
        self.scheduler = Scheduler(config, kv_cache)
        self._sequences: dict[RequestId, AnswerSequence] = {}
        self._groups: dict[str, Group] = {}
        self._grammars = Grammars(tokenizer, runner.vocab_size)
        self._step_times = StepTimes()
        proposer = proposer or NgramProposer()
        self._speculator: Speculator | None = None
        if num_draft_tokens:
            self._speculator = Speculator(proposer, num_draft_tokens, self._step_times, clock_ns)
        self._num_steps = self._num_computed = self._num_output = 0
        self._num_generated = 0

    @classmethod
    def load(cls, path: str | Path, **engine_config: Any) -> LLMEngine:
        """Opens a GGUF file, a Hugging Face folder or a folder that `compile llm` wrote.

        Args:
            path: the model.
            engine_config: the fields of `backends.llm.engine.config.EngineConfig`.

        Raises:
            ModelkilnError: the model cannot be read or does not fit.
        """
        from backends.llm.engine.load import load_engine

        return load_engine(Path(path), engine_config)

    @property
    def has_requests(self) -> bool:
        return bool(self._groups)

    @property
    def block_size(self) -> int:
        """Tokens in one block of the KV cache."""
        return self._runner.block_size

    def lacks_grammar(self, params: SamplingParams) -> bool:
        """Returns whether `add_request` would have to compile a grammar; safe for threads."""
        return params.structured_outputs is not None and not self._grammars.knows(params.structured_outputs)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles what `params.structured_outputs` asks for, so that `add_request` finds it; safe for threads.

        Called by the thread that brings a request, it keeps the engine's thread free: a large schema takes some 100 ms,
        the first of a model's life, which makes the library's vocabulary, a second.

        Raises:
            InvalidRequest: the grammar is not taken.
        """
        if params.structured_outputs is not None:
            self._grammars.compile(params.structured_outputs)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline_ms: float | None = None,
        cache_salt: str = "",
    ) -> None:
        """Takes a request over; `step` returns what becomes of it.

        Args:
            request_id: not in use.
            prompt: a text, or token ids as they are.
            priority, client: what the policies `priority` and `fair` go by.
            deadline_ms: from now, until the whole answer is there.
            cache_salt: only requests with the same salt share cached prefixes.

        Raises:
            InvalidRequest: a value is not allowed for this model.
            RequestRefused: it can never fit, too many wait, or the deadline cannot be met.
        """
        params = params or SamplingParams()
        params.check_vocabulary(self._runner.vocab_size)
        if request_id in self._groups:
            raise RequestRefused(f"request id '{request_id}' is in use", "invalid")
        token_ids = self._token_ids(prompt)
        now_ns = self._clock_ns()
        deadline_ns = None if deadline_ms is None else now_ns + round(deadline_ms * 1e6)
        group = Group(request_id, params, prompt_logprobs=None if params.prompt_logprobs is None else [])
        for index in range(params.n):
            request = Request(
                request_id=RequestId(request_id if params.n == 1 else f"{request_id}/{index}"),
                prompt_token_ids=token_ids,
                max_output_tokens=params.max_tokens or self.scheduler.max_model_len,
                arrival_ns=now_ns,
                stop_token_ids=self._stop_token_ids(params),
                min_output_tokens=params.min_tokens,
                priority=priority,
                client=client,
                deadline_ns=deadline_ns,
                cache_salt=cache_salt.encode(),
                wants_prompt_logits=params.prompt_logprobs is not None and index == 0,
            )
            group.sequences.append(self._sequence(group, index, request))
        first, *others = group.sequences
        if deadline_ms is not None:
            self._check_deadline(first.request, deadline_ms)
        self.scheduler.add_request(first.request)
        group.held = others
        self._groups[request_id] = group
        self._sequences[first.request_id] = first

    def abort(self, request_id: str) -> list[StepOutput]:
        """Ends a request at once and frees its blocks; what is returned are its last outputs, none where it is gone."""
        group = self._groups.get(request_id)
        return self._end_group(group, FinishReason.ABORT) if group else []

    def step(self) -> list[StepOutput]:
        """Computes one step of all requests; returns what is new. Does nothing where there are none."""
        outputs: list[StepOutput] = []
        now_ns = self._clock_ns()
        for request_id in self.scheduler.expired(now_ns):
            sequence = self._sequences.get(request_id)  # gone where another answer of its request was late too
            outputs += self._end_group(sequence.group, FinishReason.DEADLINE) if sequence else []
        output = self.scheduler.schedule(now_ns)
        if not output.requests:
            return outputs
        started_ns = self._clock_ns()
        logits = self._runner.execute(output).logits
        sampled, errors = sample_step(output, logits, self._sequences, self._grammars)
        seconds = (self._clock_ns() - started_ns) / 1e9
        # All tokens of a step without prompts are decodes and drafts, which have logits each.
        has_prompts = output.num_tokens != output.num_logits
        self._step_times.observe(output.num_tokens, seconds, has_prompts=has_prompts)
        # What failed leaves first: keys and values of a NaN must not be published for others to find.
        for request_id, error in errors.items():
            outputs += self._fail(self._sequences[request_id], error)
        updates = self.scheduler.update_from_output(output, {i: s.token_ids for i, s in sampled.items()})
        outputs += [self._advance(update, sampled[update.request.request_id]) for update in updates]
        if self._speculator:
            self._speculate(self._speculator)
        self._num_steps += 1
        self._num_computed += output.num_tokens
        return outputs

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerateOutput]:
        """Answers a batch of prompts; the engine must have nothing else to do.

        Args:
            prompts: texts or token ids.
            params: for all, or one for each.
            progress: show a bar on stderr where that is a terminal.

        Returns:
            One result for each prompt, in order.

        Raises:
            InvalidRequest, RequestRefused: one of the prompts is not taken; none is computed then.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(params)} sampling parameters for {len(prompts)} prompts", param="params")
        request_ids = [f"generate-{self._num_generated + i}" for i in range(len(prompts))]
        self._num_generated += len(prompts)
        groups: list[Group] = []
        try:
            for request_id, prompt, one in zip(request_ids, prompts, params, strict=True):
                self.add_request(request_id, prompt, one)
                groups.append(self._groups[request_id])
            self._run(groups, progress)
        finally:
            for group in groups:
                self.abort(group.request_id)
        return [group.result() for group in groups]

    def stats(self) -> EngineStats:
        """Returns the counters."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_output_tokens=self._num_output,
            num_draft_tokens=self._speculator.controller.num_drafts if self._speculator else 0,
            num_accepted_tokens=self._speculator.controller.num_accepted if self._speculator else 0,
            num_drafts=self._speculator.controller.num_proposals if self._speculator else 0,
            num_masks=self._grammars.num_masks,
            mask_seconds=self._grammars.mask_seconds,
        )

    def warm_up(self) -> None:
        """Computes two steps that nobody sees; there must be no requests yet.

        The first ones take up to a second longer than others, which a first request and the estimate of whether
        deadlines can be met would feel.
        """
        for num_tokens in (min(16, self._runner.block_size), 1):
            scheduled = ScheduledRequest(RequestId("warm-up"), (0,) * num_tokens, 0, (BlockId(0),), 1)
            self._runner.execute(SchedulerOutput((scheduled,)))

    @property
    def compile_seconds(self) -> float:
        """How long the runner's library took to compile the graph; 0 where nothing is compiled."""
        return float(getattr(self._runner, "compile_seconds", 0.0))

    def close(self) -> None:
        """Ends all requests and frees the model and the cache."""
        for request_id in list(self._groups):
            self.abort(request_id)
        self._grammars.close()
        if self._speculator:
            self._speculator.close()
        self._runner.close()

    def _run(self, groups: Sequence[Group], progress: bool) -> None:
        from backends.llm.engine.progress import token_progress

        with token_progress(len(groups), enabled=progress) as advance:
            while self.has_requests:
                outputs = self.step()
                advance(sum(o.is_last for o in outputs), sum(len(o.delta.token_ids) for o in outputs))

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        for token_id in prompt:
            if not 0 <= token_id < self._runner.vocab_size:
                allowed = f"0 to {self._runner.vocab_size - 1}, the model's vocabulary"
                raise InvalidRequest(f"the prompt has token id {token_id}; allowed: {allowed}", param="prompt")
        return tuple(prompt)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        return own | frozenset(params.stop_token_ids)

    def _sequence(self, group: Group, index: int, request: Request) -> AnswerSequence:
        params = group.params
        wanted = params.structured_outputs
        seed = seed_from_request_id(group.request_id) if params.seed is None else params.seed
        state = SamplerState(
            params,
            request.prompt_token_ids,
            seed=seed,
            sample_index=index,
            stop_token_ids=request.stop_token_ids,
            matcher=self._grammars.compile(wanted, ignore_eos=params.ignore_eos) if wanted else None,
        )
        return AnswerSequence(group, index, request, state, Answer(params, self.tokenizer))

    def _check_deadline(self, request: Request, deadline_ms: float) -> None:
        least = request.max_output_tokens if not request.stop_token_ids else max(1, request.min_output_tokens)
        room = self.scheduler.max_model_len - request.num_prompt_tokens
        needed_s = earliest_finish_s(
            self._step_times,
            self.scheduler.num_tokens_before(request),
            min(least, room),
            self.scheduler.config.max_num_batched_tokens,
        )
        if needed_s * 1e3 > deadline_ms:
            raise RequestRefused(
                f"the deadline is in {deadline_ms:.0f} ms, the answer can be there in {needed_s * 1e3:.0f} ms at the "
                "earliest",
                "deadline",
            )

    def _advance(self, update: RequestUpdate, sampled: Sampled) -> StepOutput:
        """Brings an answer up to date with the tokens of a step."""
        sequence = self._sequences[update.request.request_id]
        self._start_held(sequence.group)
        # Drafts may have gone beyond the token that ends the answer for the scheduler.
        is_complete = sampled.is_complete and len(update.new_token_ids) == len(sampled.token_ids)
        delta = sequence.answer.add(
            update.new_token_ids, sampled.logprobs, update.request.finish_reason, is_complete=is_complete
        )
        if self._speculator:
            self._speculator.advanced(sequence, update.num_accepted_drafts)
        self._num_output += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.scheduler.finish(sequence.request_id, delta.finish_reason)
            return self._ended(sequence, delta)
        return sequence.output(delta)

    def _speculate(self, speculator: Speculator) -> None:
        """Proposes the next step's drafts."""
        decoding = [r.request_id for r in self.scheduler.running if r.num_uncomputed_tokens == 1]
        speculator.propose(decoding, self._sequences)
        for request_id in decoding:
            self.scheduler.set_drafts(request_id, self._sequences[request_id].draft.token_ids)

    def _start_held(self, group: Group) -> None:
        """Starts the other answers of a request, now that the first has computed the prompt."""
        for sequence in group.held:
            self.scheduler.add_request(sequence.request, limited=False)  # the request was taken with all its answers
            self._sequences[sequence.request_id] = sequence
        group.held = []

    def _fail(self, sequence: AnswerSequence, error: Exception) -> list[StepOutput]:
        """Ends an answer, and those that wait for its prompt, with an error; no other request is touched."""
        failed = [sequence, *sequence.group.held]
        sequence.group.held = []
        outputs = []
        for each in failed:
            each.error, each.error_param = str(error), getattr(error, "param", "")
            self.scheduler.finish(each.request_id, FinishReason.ERROR)
            outputs.append(self._ended(each, each.answer.finish(FinishReason.ERROR)))
        return outputs

    def _end_group(self, group: Group, reason: FinishReason) -> list[StepOutput]:
        """Ends all answers of a request that have not ended."""
        outputs = []
        group.held = []
        for sequence in group.sequences:
            if sequence.answer.finish_reason is None:
                self.scheduler.finish(sequence.request_id, reason)
                outputs.append(self._ended(sequence, sequence.answer.finish(reason)))
        return outputs

    def _ended(self, sequence: AnswerSequence, delta: AnswerDelta) -> StepOutput:
        """Forgets an answer, and its request with the last one."""
        group = sequence.group
        self._sequences.pop(sequence.request_id, None)
        if self._speculator:
            self._speculator.remove(sequence.request_id)
        is_last = group.has_ended
        if is_last:
            del self._groups[group.request_id]
        return sequence.output(delta, is_last=is_last)
