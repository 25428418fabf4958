"""What is seen of a pool at one moment. Frozen structs, all of them JSON.

Nothing is decided by these: they are for dashboards, alerts and people. Every list has
a bound (`reading.py`), so that looking costs the same however much waits.
"""

import msgspec

from ..process_card import ProcessCard


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Waiting jobs of one class and length bucket, over all tenants."""

    model: str
    partition: int
    job_class: str
    bucket: str
    """Upper bound in prompt tokens, `beyond`; `resume` for what was handed back or
    retried and goes first, whose class the stream does not tell (`job_class` is
    empty)."""
    jobs: int
    oldest_ms: int | None = None
    """Age of the oldest entry."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What waits of one class or one tenant, over all models."""

    name: str
    jobs: int
    tokens: int
    """Prompt tokens, estimated."""
    later_jobs: int = 0
    """Delayed or between two attempts; not among `jobs`."""


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group, as of its last heartbeat."""

    group: str
    model: str
    partition: int
    state: str
    """`ready`, `draining`, or `silent`: no heartbeat, and its record has expired."""
    serves: str = "any"
    tp: int = 1
    """Processes that it is split over."""
    running: int = 0
    """Sequences in the engine, waiting ones included."""
    max_running: int = 0
    pool_blocks: int = 0
    used_blocks: int = 0
    """Held by sequences."""
    cached_blocks: int = 0
    """Held by nobody, with a prefix that a later prompt may find."""
    free_blocks: int = 0
    """Held by nobody and empty; used, cached and free make up the pool."""
    step_ms: float = 0.0
    """Fitted time of a step with the sequences that run now."""
    steps: int = 0
    scheduled_tokens: int = 0
    """Rows computed since it started: prompt and output."""
    output_tokens: int = 0
    """Made since it started."""
    tokens_per_s: float = 0.0
    """Output tokens over the last ten seconds or so."""
    prefill_backlog: int = 0
    preemptions: int = 0
    prefix_hit_rate: float | None = None
    """Share of prompt tokens that came from the prefix cache; None: nothing asked."""
    age_ms: int = 0
    """Since its last heartbeat."""


class SchedulerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who schedules a shard."""

    model: str
    partition: int
    active: str | None
    """The scheduler that holds the lease; None: nobody, so nothing is dispatched."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Times of jobs that ended lately, in milliseconds since their enqueue.

    None where no job of the window tells.
    """

    jobs: int = 0
    """How many ended, in whatever state."""
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    total_p50_ms: float | None = None
    total_p95_ms: float | None = None
    total_p99_ms: float | None = None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Over the last ten seconds or so."""

    jobs_per_s: float = 0.0
    """Jobs that ended, in whatever state."""
    failed_per_s: float = 0.0
    """Of these, those that failed."""
    tokens_per_s: float = 0.0
    """Output tokens of all groups."""


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one moment, by the clock of Redis."""

    at_ms: int
    queues: tuple[QueueDepth, ...] = ()
    waiting_jobs: int = 0
    waiting_tokens: int = 0
    classes: tuple[Waiting, ...] = ()
    """Always both classes."""
    tenants: tuple[Waiting, ...] = ()
    """Those with most jobs waiting, most first."""
    delayed: int = 0
    """Jobs that wait for their time or for another attempt."""
    leased: int = 0
    """Jobs that some group holds: dispatched or running."""
    groups: tuple[GroupStatus, ...] = ()
    schedulers: tuple[SchedulerStatus, ...] = ()
    dead_letters: int = 0
    processes: tuple[ProcessCard, ...] = ()
    rates: Rates = Rates()
    latency: Latency = Latency()
    """Of the newest ends, at most 512 and five minutes old."""
    latency_by_class: dict[str, Latency] = {}
    left_out: tuple[str, ...] = ()
    """What there was too much of to look at all: `shards`, `lanes`, `tenants`, …"""

    @property
    def running(self) -> int:
        """Sequences in all engines."""
        return sum(group.running for group in self.groups)

    @property
    def oldest_ms(self) -> int | None:
        """Age of the job that has waited longest; None where nothing waits."""
        ages = [q.oldest_ms for q in self.queues if q.oldest_ms is not None]
        return max(ages, default=None)


class HistorySample(msgspec.Struct, frozen=True, kw_only=True):
    """The pool over ten seconds, as the janitor noted it in `tm:history`."""

    at_ms: int
    tokens_per_s: float = 0.0
    jobs_per_s: float = 0.0
    failed_per_s: float = 0.0
    waiting: dict[str, int] = {}
    """Jobs by class."""
    delayed: int = 0
    running: int = 0
    pool_blocks: int = 0
    used_blocks: int = 0
    dead_letters: int = 0
    ttft_p50_ms: float | None = None
    """Of jobs that ended in these ten seconds, as are those below."""
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    total_p50_ms: float | None = None
    total_p95_ms: float | None = None
    total_p99_ms: float | None = None
