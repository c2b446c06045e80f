"""LLMEngine: prompts in, answers out. One step is schedule, execute, sample, update; nothing runs between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.llm.engine.admission import check_deadline
from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.live_requests import LiveRequests
from backends.llm.engine.new_requests import Prompt, RequestMaker, check_fields
from backends.llm.engine.offline import answer_all, params_for_each
from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.engine.request import FinishReason
from backends.llm.engine.results import EngineStats, GenerateOutput, StepOutput
from backends.llm.engine.scheduler import Scheduler
from backends.llm.engine.speculator import Speculator
from backends.llm.engine.step_sampling import sample_step
from backends.llm.errors import RequestRefused
from backends.llm.runners.base import ModelRunner
from backends.llm.sampling.grammar import Grammars
from backends.llm.sampling.ngram import NgramProposer
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import Proposer
from backends.llm.sampling.step_times import StepTimes
from backends.llm.tokenizers.base import Tokenizer


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
        self._grammars = Grammars(tokenizer, runner.vocab_size)
        self._maker = RequestMaker(tokenizer, self._grammars, runner.vocab_size, self.scheduler.max_model_len)
        self._step_times = StepTimes()
        proposer = proposer or NgramProposer()
        self._speculator: Speculator | None = None
        if num_draft_tokens:
            self._speculator = Speculator(proposer, num_draft_tokens, self._step_times, clock_ns)
        self._live = LiveRequests(self.scheduler, self._speculator)
        self._num_steps = self._num_computed = self._num_generated = 0
        self._is_closed = False

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
        return bool(self._live.groups)

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
        if self._is_closed:
            raise RequestRefused("the engine is closed; load the model again", "invalid")
        params = SamplingParams() if params is None else params
        check_fields(
            request_id, params, priority=priority, client=client, deadline_ms=deadline_ms, cache_salt=cache_salt
        )
        params.check_vocabulary(self._runner.vocab_size)
        if request_id in self._live.groups:
            raise RequestRefused(f"request id '{request_id}' is in use", "invalid")
        token_ids = self._maker.token_ids(prompt)
        now_ns = self._clock_ns()
        group = self._maker.make(
            request_id,
            token_ids,
            params,
            arrival_ns=now_ns,
            priority=priority,
            client=client,
            deadline_ns=None if deadline_ms is None else now_ns + round(deadline_ms * 1e6),
            cache_salt=cache_salt,
        )
        if deadline_ms is not None:
            check_deadline(group.sequences[0].request, deadline_ms, self.scheduler, self._step_times)
        self._live.start(group)

    def abort(self, request_id: str) -> list[StepOutput]:
        """Ends a request at once and frees its blocks; what is returned are its last outputs, none where it is gone."""
        group = self._live.groups.get(request_id)
        return self._live.end(group, FinishReason.ABORT) if group else []

    def step(self) -> list[StepOutput]:
        """Computes one step of all requests; returns what is new. Does nothing where there are none."""
        now_ns = self._clock_ns()
        outputs = self._live.end_late(now_ns)
        output = self.scheduler.schedule(now_ns)
        if not output.requests:
            return outputs
        started_ns = self._clock_ns()
        logits = self._runner.execute(output).logits
        sampled, errors = sample_step(output, logits, self._live.sequences, self._grammars)
        seconds = (self._clock_ns() - started_ns) / 1e9
        # All tokens of a step without prompts are decodes and drafts, which have logits each.
        has_prompts = output.num_tokens != output.num_logits
        self._step_times.observe(output.num_tokens, seconds, has_prompts=has_prompts)
        # What failed leaves first: keys and values of a NaN must not be published for others to find.
        for request_id, error in errors.items():
            outputs += self._live.fail(request_id, error)
        updates = self.scheduler.update_from_output(output, {i: s.token_ids for i, s in sampled.items()})
        outputs += [self._live.advance(update, sampled[update.request.request_id]) for update in updates]
        self._live.propose_drafts()
        self._num_steps += 1
        self._num_computed += output.num_tokens
        return outputs

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerateOutput]:
        """Answers a batch of prompts; the engine must have nothing else to do.

        Args:
            prompts: texts or token ids; a text alone is one prompt.
            params: for all, or one for each.
            progress: show a bar on stderr where that is a terminal.

        Returns:
            One result for each prompt, in order.

        Raises:
            InvalidRequest, RequestRefused: one of the prompts is not taken, or other requests are on their way, whose
                outputs nobody would see; nothing is computed then.
        """
        if self.has_requests:
            raise RequestRefused(
                f"generate() wants an engine with nothing else to do, {len(self._live.groups)} requests are on their "
                "way; end them with step() or abort() first",
                "invalid",
            )
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = params_for_each(params, len(prompts))
        request_ids = [f"generate-{self._num_generated + i}" for i in range(len(prompts))]
        self._num_generated += len(prompts)
        asked = dict(zip(request_ids, zip(prompts, each, strict=True), strict=True))
        return answer_all(self, self._live.groups, asked, progress=progress)

    def stats(self) -> EngineStats:
        """Returns the counters."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_output_tokens=self._live.num_output_tokens,
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
        """Ends all requests and frees the model and the cache; a second time it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in list(self._live.groups):
            self.abort(request_id)
        self._grammars.close()
        if self._speculator:
            self._speculator.close()
        self._runner.close()
