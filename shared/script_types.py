"""What the scripts take and give. Frozen structs; see `scripts.Scripts`."""

from typing import Final, Literal

import msgspec

from .keys import JobId
from .lifecycle import State
from .messages import DEFAULT_VERSION, InputRef

EnqueueStatus = Literal["queued", "duplicate", "conflict", "full", "late", "invalid"]
"""`late`: its deadline cannot be met; `invalid`: an argument is wrong. Nothing was
recorded then, as with `full`, and neighbours are untouched."""
DispatchStatus = Literal[
    "dispatched", "gone", "cancelled", "expired", "no_credit", "newer", "fenced"
]
"""`gone`: not queued any more. `newer`: the group does not read its record.
`fenced`: another scheduler is active."""
EmitStatus = Literal["written", "duplicate", "lost", "cancelled"]
"""`cancelled`: written, but the job is to be stopped."""
FinishStatus = Literal["recorded", "duplicate", "lost"]
RenewStatus = Literal["held", "lost", "cancelled"]
"""`cancelled`: held, but the job is to be stopped."""
FailStatus = Literal["retrying", "failed", "cancelled", "lost"]
"""`cancelled`: a cancel was asked for meanwhile and has taken effect."""
EndState = Literal["succeeded", "failed", "cancelled", "expired"]
DEAD_MS: Final = 7 * 86_400_000
"""How long dead letters stay where `retention.dead_s` says nothing else."""


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job to record."""

    id: JobId
    payload: bytes
    """JSON JobRequest."""
    payload_hash: str
    """Equal for equal payloads; no white space."""
    job_class: str
    tenant: str
    priority: int = 0
    bucket: str
    tokens: int
    """Estimated prompt tokens, at least 1."""
    max_tokens: int
    """Most output tokens over all choices, at least 1."""
    seed: int
    deadline_ms: int | None = None
    """From now, by the clock of Redis."""
    delay_ms: int = 0
    not_before_ms: int | None = None
    """Time of Redis at which it is queued, instead of a delay."""
    refuse_late: bool = False
    """Record nothing if it cannot meet its deadline at the measured rate."""
    webhook: str | None = None
    """Address that is told of the end."""
    version: str | None = None
    """The only version of the model that is to run it."""
    adapter: str | None = None
    """Name of its request's adapter, for who looks at the record."""
    v: int = 1
    """Lowest schema version whose readers understand the job."""
    keep_ms: int
    """How long results, logs and inputs stay after the job's end."""
    idempotency_key: str | None = None
    upload: tuple[InputRef, bytes] | None = None
    """An input by reference, which must stand in the store before the job is sent."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tenant may have waiting; None takes the limit of all tenants."""

    waiting_jobs: int | None = None
    waiting_tokens: int | None = None
    tokens_per_minute: int | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait in one shard; names and values as in `LimitsConfig`."""

    max_waiting_jobs: int = 100_000
    max_waiting_tokens: int = 50_000_000
    max_waiting_bytes: int = 1024**3
    tenant_waiting_jobs: int = 100_000
    tenant_waiting_tokens: int = 50_000_000
    tenant_tokens_per_minute: int = 0
    max_payload_bytes: int = 4 * 1024 * 1024
    service_ms: int = 0
    """Measured time from dispatch to end, for what asks to be refused when late."""
    tenants: dict[str, TenantLimits] = {}
    """Tenants with limits of their own."""

    def fields(self) -> dict[str, int]:
        """Returns the hash `limits` as it stands in Redis."""
        found = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if name != "tenants"
        }
        for name, own in self.tenants.items():
            for field, value in msgspec.structs.asdict(own).items():
                if value is not None:
                    found[f"tenant:{name}:{field}"] = value
        return found


class EnqueueReply(msgspec.Struct, frozen=True):
    """What became of one new job."""

    status: EnqueueStatus
    job_id: str
    """Of the first job with this idempotency key when it is a duplicate."""
    retry_after_s: float | None = None
    """Set when `status` is full."""
    detail: str = ""
    """Why nothing was recorded; with `full` it begins with the limit's name."""
    needed_s: float | None = None
    """Time that the job would take, when `status` is late."""


class DispatchItem(msgspec.Struct, frozen=True, kw_only=True):
    """One queued job for a group."""

    job_id: str
    tokens: int
    """Exact prompt tokens."""
    token_ids: bytes
    """Little-endian int32."""
    cost_blocks: int
    choices: int = 1
    """Each takes a running slot and prefills the prompt."""
    bucket: str
    entry_key: str | None = None
    """Stream the entry was read from; saves a round trip."""
    entry_id: str = ""
    """With it, an entry whose job is gone is removed."""
    alone: bool = False
    """Only into an empty group, and nobody joins it there."""


class DispatchReply(msgspec.Struct, frozen=True):
    """What became of one dispatch."""

    job_id: str
    status: DispatchStatus
    epoch: int = 0
    """0 unless dispatched; for `newer`, the record's schema version."""


class StartItem(msgspec.Struct, frozen=True):
    """One entry of the group's work stream."""

    job_id: str
    epoch: int
    entry_id: str


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A job that the group now runs, or why it does not."""

    status: Literal["started", "lost", "cancelled"]
    job_id: str
    epoch: int
    payload: bytes = b""
    token_ids: bytes = b""
    log: tuple[bytes, ...] = ()
    """JSON deltas of earlier epochs, in order."""
    seed: int = 0
    job_class: str = ""
    priority: int = 0
    tenant: str = ""
    attempts: int = 0
    """Runs that ended in a fault before this one."""
    lease_losses: int = 0
    enqueued_ms: int = 0
    started_ms: int = 0
    """Of the first start."""
    first_ms: int | None = None
    """Of the first delta ever."""
    deadline_ms: int | None = None
    """By the clock of Redis."""
    weights: str | None = None
    """Version pinned by the first delta ever."""


class EmitItem(msgspec.Struct, frozen=True):
    """One delta."""

    job_id: str
    epoch: int
    seq: int
    """From 1 within the epoch, rising."""
    delta: bytes
    """JSON Delta."""


class FinishItem(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one job."""

    job_id: str
    epoch: int
    seq: int
    """Of the end marker, after that of the last delta."""
    state: EndState
    result: bytes
    """JSON JobResult."""
    end: bytes
    """JSON Delta with `end`."""
    error: str = ""


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group: what it can hold and what of that is not promised yet."""

    group: str
    total_blocks: int
    max_running: int
    batch_tokens: int
    """Prompt tokens that may be dispatched and not yet prefilled."""
    block_size: int
    max_context: int
    weights_version: str
    step_fit_ms: tuple[float, float] = (0.0, 0.0)
    """(a, b): a step of n tokens takes about a + b n ms."""
    state: Literal["ready", "draining"] = "ready"
    serves: str = "any"
    """`any`, or the lengths it is kept for: `short` or `long`."""
    tp: int = 1
    """Processes that it is split over."""
    schema: int = 1
    """Newest schema version of the jobs that it can read."""
    version: str = DEFAULT_VERSION
    """Of the model."""
    tokenizer: str = ""
    """Fingerprint of the one that its prompts are to be encoded with."""
    credit_blocks: int = 0
    """Kept by the scripts, as are the fields below; ignored when registering."""
    credit_running: int = 0
    credit_tokens: int = 0
    bulk_blocks: int = 0
    """What bulk jobs hold of the credit now; interactive jobs may take it as well."""
    bulk_running: int = 0
    bulk_tokens: int = 0
    alone: str = ""
    """The job that runs alone here; nobody joins it."""
    heartbeat_ms: int = 0
    """By the clock of Redis."""
    tokens_per_s: float = 0.0
    """Output tokens over the last ten seconds or so."""
    output_tokens: int = 0
    """Made since the start of this incarnation."""
    counters: "EngineCounters | None" = None
    """The engine's own, as of the last heartbeat; None: not read, not sent."""
    adapters: frozenset[str] = frozenset()
    """What is in its memory (`adapters.short_digest`), of many those used last."""


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine counts, for people: nothing is decided by it."""

    free_blocks: int = 0
    num_running: int = 0
    """Sequences admitted and not finished, waiting ones included."""
    prefill_backlog: int = 0
    """Prompt tokens accepted and not yet prefilled."""
    overruns: int = 0
    """Requests that came beyond what was promised: zero while the scheduler is
    right."""
    steps: int = 0
    scheduled_tokens: int = 0
    pool_blocks: int = 0
    """KV blocks there are; `GroupInfo.total_blocks` is what is announced."""
    cached_blocks: int = 0
    """Of the free ones, those whose content a later prompt may find."""
    allocated_tokens: int = 0
    """Token slots of the blocks in use."""
    used_tokens: int = 0
    """Of these, slots in which a token stands."""
    preemptions: int = 0
    """Times a sequence yielded its blocks and was computed again."""
    prefix_tokens_asked: int = 0
    """Tokens of sequences when they began to run."""
    prefix_tokens_hit: int = 0
    """Of these, tokens found in the prefix cache."""
    out_of_memory: int = 0
    """Times a step did not fit in memory and was halved."""
    adapters: int = 0
    """Adapters in memory."""
    adapter_loads: int = 0
    adapter_evictions: int = 0
    """Adapters that made room for others."""


CancelStatus = Literal["cancelled", "cancelling", "unknown"] | State
"""A terminal `State` when the job had ended before."""
