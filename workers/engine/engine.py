"""Continuous batching: `step()` plans, runs and delivers. One thread owns an engine."""

import time
from collections.abc import Callable, Iterable

from ...shared.errors import EngineError
from ...shared.messages import FinishReason, JobError
from .adapters.leases import Leases
from .adapters.source import AdapterSource
from .admission import check_request, namespace_of, output_limit
from .batch import ModelRunner
from .bulk_share import BulkShare
from .counting import StepCount, capacity_of
from .detokenizer import DetokenizerSource
from .kv.manager import KVManager
from .pacing import Pace
from .planner import Plan, num_tokens, plan_step
from .preemption import make_room
from .recovery import StepLimit, processing_failed
from .request import (
    Capacity,
    EngineRequest,
    Finished,
    FinishedChoice,
    StepOutput,
    TokenDelta,
)
from .roster import Roster
from .sampler import Sampled, SampleRows, sample
from .sequence import Sequence
from .step_time import StepTimeFit

Outcome = tuple[Sequence, Sampled | EngineError]
"""A sequence's next token, or the error that ends its request."""


class Engine:
    """Runs requests on one model, many at a time.

    Args:
        runner: The model.
        tokenizer: Where each output's detokenizer comes from.
        max_running: Sequences in a step at most.
        prefill_chunk: Tokens in a step: decode rows first, prefill fills the rest.
        prefix_cache: Whether the K and V of past requests serve later ones that begin
            with the same tokens. Choices of one request share in any case.
        step_target_ms: Time that a step may take while interactive sequences decode;
            None is twice that of a decode step, 0 is no bound.
        kv_overcommit: Times the KV pool that the requests sent here may need in all.
        adapters: Where the adapters are that requests name; None refuses those.
        clock: Seconds, for the step-time fit.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: DetokenizerSource,
        *,
        max_running: int = 16,
        prefill_chunk: int = 512,
        prefix_cache: bool = True,
        step_target_ms: float | None = None,
        kv_overcommit: float = 1.0,
        adapters: AdapterSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self._sample: SampleRows = sample
        self._prefix_cache = prefix_cache
        self._kv = KVManager(
            runner.num_blocks, runner.block_size, keep_idle=prefix_cache
        )
        self._roster = Roster(self._kv, max_running, overcommit=kv_overcommit)
        self._leases = Leases(adapters)
        self._limit = StepLimit(runner)
        self._pace = Pace(step_target_ms)
        self._share = BulkShare()
        self._ended_by_replay: list[Sequence] = []
        """Choices that ended while they were replayed; the next step says so."""
        self._arrivals = 0
        self._count = StepCount()
        self._fit = StepTimeFit()

    # --- one step ------------------------------------------------------------------
    def step(self) -> StepOutput:
        """Runs one step and returns what came out of it.

        Raises:
            Exception: Whatever the model raised for every slice of the step, running
                out of memory apart. The engine is as before the step: step again, or
                `abort_all`.
        """
        plan = self._plan()
        outcomes = self._run(plan)
        return self._deliver(outcomes)

    def _plan(self) -> Plan:
        self._roster.admit()
        self._roster.reuse()
        running = self._limit.order(self._roster.running)
        limit = self._pace.prefill_limit(running)
        plan = plan_step(running, self._prefill_chunk, limit, self._share)
        return make_room(self._limit.apply(plan), self._roster)

    def _run(self, plan: Plan) -> list[Outcome]:
        """Runs the model and samples; when memory runs out, on part of the plan."""
        if not plan:
            return []
        started = self._clock()
        ran = self._limit.run(plan)
        failed: list[Outcome] = list(ran.failed)
        if ran.logits is None:
            return failed
        sampling = [part.sequence for part in ran.plan if part.samples]
        sampled = self._sample(ran.logits, [sequence.row for sequence in sampling])
        self._roster.settle(ran.plan)
        tokens = num_tokens(ran.plan)
        self._count.add(tokens)
        if ran.plan is plan:  # else the time of attempts that failed is in it
            milliseconds = (self._clock() - started) * 1e3
            self._fit.observe(tokens, milliseconds)
            self._pace.observe(plan, milliseconds)
        return failed + list(zip(sampling, sampled, strict=True))

    def _deliver(self, outcomes: Iterable[Outcome]) -> StepOutput:
        finished: list[Finished] = []
        touched, self._ended_by_replay = self._ended_by_replay, []
        for sequence, outcome in outcomes:
            if sequence.request.id not in self._roster:
                continue  # another choice of it failed in this step
            error = self._accept(sequence, outcome)
            if error is None:
                touched.append(sequence)
            else:
                finished.append(self._fail(sequence, error))
        # By identity: a cancelled request may have come again under the same id.
        here = [one for one in touched if one in self._roster.sequences(one.request.id)]
        deltas: list[TokenDelta] = []
        for sequence in here:
            if sequence.request.id not in self._roster:
                continue  # the delta of another choice of it failed
            delta = self._take_delta(sequence)
            if isinstance(delta, EngineError):
                finished.append(self._fail(sequence, delta))
            elif delta is not None:
                deltas.append(delta)
        finished += [
            self._finish(request_id)
            for request_id in dict.fromkeys(one.request.id for one in here)
            if request_id in self._roster and self._roster.has_ended(request_id)
        ]
        return StepOutput(deltas=tuple(deltas), finished=tuple(finished))

    def _take_delta(self, sequence: Sequence) -> TokenDelta | EngineError | None:
        """Returns a sequence's news, or the error that ends its request."""
        try:
            return sequence.take_delta()
        except Exception as error:  # noqa: BLE001 - must not end its neighbours
            return processing_failed(sequence, error)

    def _accept(
        self, sequence: Sequence, outcome: Sampled | EngineError
    ) -> EngineError | None:
        """Gives a sequence its token; returns the error that ends its request."""
        if isinstance(outcome, EngineError):
            return outcome
        try:
            sequence.accept(outcome.token_id, outcome.logprob)
        except Exception as error:  # noqa: BLE001 - must not end its neighbours
            return processing_failed(sequence, error)
        if sequence.finish_reason is not None:
            self._roster.retire(sequence)
        return None

    def _finish(self, request_id: str) -> Finished:
        sequences = self._roster.sequences(request_id)
        self._leave(request_id)
        return Finished(
            request_id=request_id,
            prompt_tokens=sequences[0].num_prompt,
            choices=tuple(sequence.outcome() for sequence in sequences),
        )

    def _fail(self, sequence: Sequence, error: EngineError) -> Finished:
        self._leave(sequence.request.id, keep=False)
        return Finished(
            request_id=sequence.request.id,
            prompt_tokens=sequence.num_prompt,
            error=JobError(code=error.code, message=str(error)),
        )

    # --- requests in and out -----------------------------------------------------
    def add(self, request: EngineRequest) -> None:
        """Takes a request; its tokens come out of the following steps.

        Args:
            request: With `emitted`, it resumes after those tokens.

        Raises:
            InvalidRequest: A field is wrong, or the id is already here.
            PromptTooLong: The prompt leaves no room for output.
            KVPoolExhausted: One choice alone needs more blocks than exist.
            AdapterUnavailable: Its adapter is not loaded.
        """
        self._roster.refuse_duplicate(request)
        check_request(request, self._runner, self._kv)
        self._arrivals += 1
        namespace = namespace_of(request, self._runner)
        if not self._prefix_cache:  # then only the choices of one request share
            namespace = (self._arrivals,) if request.sampling.n > 1 else None
        sequences = tuple(
            Sequence(
                request,
                choice,
                max_output=output_limit(request, self._runner.max_context),
                eos_ids=self._runner.eos_token_ids,
                source=self._tokenizer,
                arrival=self._arrivals,
                namespace=namespace,
            )
            for choice in range(request.sampling.n)
        )
        for sequence, emitted in zip(sequences, request.emitted, strict=False):
            sequence.replay(emitted)
        self._leases.take(request)
        self._roster.enter(request.id, sequences)
        self._ended_by_replay += [
            sequence for sequence in sequences if sequence.finish_reason is not None
        ]

    def _leave(self, request_id: str, *, keep: bool = True) -> bool:
        self._leases.give_back(request_id)
        return self._roster.leave(request_id, keep=keep)

    def cancel(self, request_id: str) -> bool:
        """Ends a request now: its blocks are free and no output follows.

        Call it between steps; `released` tells what had come out before.

        Returns:
            False when no such request is here.
        """
        return self._leave(request_id)

    def expire(self, request_id: str) -> bool:
        """Ends a request whose deadline has passed, as `cancel` does."""
        return self._leave(request_id)

    def abort_all(self) -> tuple[str, ...]:
        """Drops every request, for a caller whose step raised; all blocks are free.

        Returns:
            Ids of the dropped requests, to be failed or retried.
        """
        dropped = self._roster.ids
        for request_id in dropped:
            self._leave(request_id)
        return dropped

    # --- what can be asked -----------------------------------------------------------
    def released(
        self, request_id: str, reason: FinishReason
    ) -> tuple[FinishedChoice, ...]:
        """Returns a request's choices as far as they have come out.

        Args:
            request_id: A request that is here; ask before `cancel` or `expire`.
            reason: For choices that have not ended by themselves.
        """
        sequences = self._roster.sequences(request_id)
        return tuple(sequence.outcome(reason) for sequence in sequences)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self._roster) > 0

    def capacity(self) -> Capacity:
        """Returns room and counters."""
        return capacity_of(
            self._kv,
            self._roster,
            max_running=self._max_running,
            out_of_memory=self._limit.halvings,
            count=self._count,
            step_fit_ms=self._fit.coefficients,
        )

    def check_integrity(self) -> None:
        """Checks the KV books; call it when idle.

        Raises:
            EngineError: free + cached + used is not the total, or an owner is wrong.
        """
        self._roster.check_integrity()
