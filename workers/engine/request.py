"""What goes into the engine and what comes out. No Redis, no asyncio, no torch."""

import msgspec

from ...shared.messages import FinishReason, JobClass, JobError, Sampling, TokenLogprob


class Emitted(msgspec.Struct, frozen=True):
    """Tokens of one choice that an earlier epoch already published."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    """Set when this choice had already ended."""
    stop_reason: str | int | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One inference request: exact token ids in, how to sample, what is already out."""

    id: str
    token_ids: tuple[int, ...]
    """Prompt token ids, at least one."""
    sampling: Sampling
    seed: int
    """Drawn at enqueue; with (choice, position) it keys each row's generator."""
    job_class: JobClass = JobClass.INTERACTIVE
    priority: int = 0
    cache_salt: str = ""
    """The tenant: only requests of one salt share cached prefixes."""
    adapter: str | None = None
    """Key of a loaded adapter, as "name@digest"; None is the base model."""
    emitted: tuple[Emitted, ...] = ()
    """By choice, when the job is resumed after a lost lease; else empty."""


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice from one step (already stop-checked, text complete)."""

    request_id: str
    choice: int
    offset: int
    """Index in the output of the first token here."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request left the engine: all its choices ended, or it failed alone."""

    request_id: str
    prompt_tokens: int
    choices: tuple["FinishedChoice", ...] = ()
    error: JobError | None = None
    """Set when the request failed; its neighbours are untouched."""


class FinishedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A complete output, over all epochs."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one `Engine.step()` produced."""

    deltas: tuple[TokenDelta, ...] = ()
    finished: tuple[Finished, ...] = ()


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's room and counters, for the scheduler and for `doctor`."""

    total_blocks: int
    free_blocks: int
    """Blocks that nobody holds, those with a cached prefix included."""
    max_running: int
    num_running: int
    """Sequences admitted and not finished, waiting ones included."""
    prefill_backlog: int
    """Prompt tokens accepted and not yet prefilled."""
    overruns: int = 0
    """Requests that came beyond what was promised: zero while the scheduler is
    right."""
    steps: int = 0
    scheduled_tokens: int = 0
    step_fit_ms: tuple[float, float] = (0.0, 0.0)
    """Step time as a + b * tokens, in milliseconds."""
    cached_blocks: int = 0
    """Of the free blocks, those whose content a later prompt may find."""
    allocated_tokens: int = 0
    """Token slots of the blocks that sequences hold."""
    used_tokens: int = 0
    """Of these, slots in which a token stands; the rest is waste."""
    preemptions: int = 0
    """Times a sequence had to yield its blocks and was computed again."""
    prefix_tokens_asked: int = 0
    """Tokens of sequences when they began to run."""
    prefix_tokens_hit: int = 0
    """Of these, tokens whose K and V were in the prefix cache."""
    out_of_memory: int = 0
    """Times a step did not fit in memory and was halved."""
