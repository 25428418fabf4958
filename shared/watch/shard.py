"""What one shard is asked for a snapshot, and what its replies say."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..errors import ProtocolError
from ..keys import Keys
from ..messages import JobClass
from ..script_types import EngineCounters, GroupInfo
from ..scripts_scheduler import group_info
from .replies import Command, moment, ms_of, pairs, rows, text, whole
from .snapshot import GroupStatus, QueueDepth, SchedulerStatus, Waiting
from .statistics import Ended, rate_of

CLASSES: Final = tuple(str(job_class) for job_class in JobClass)
_LOAD: Final = ("jobs", "tokens", "later:jobs")
_CLASS_LOAD: Final = ("jobs", "tokens")
_ENDED: Final = ("enqueued_ms", "first_ms", "finished_ms")


class Share(msgspec.Struct, frozen=True):
    """How much of each kind is looked at in one shard."""

    lanes: int
    groups: int
    ends: int
    tenants: int


class ShardView:
    """Reads one shard in two turns: what there is, then each of it.

    Args:
        keys: The shard's names.
        share: Bounds.
        since_ms: Ends before this time are of no interest.
    """

    def __init__(self, keys: Keys, share: Share, since_ms: int) -> None:
        self.keys = keys
        self._share = share
        self._since_ms = since_ms
        self._lanes: list[tuple[str, int]] = []
        self._groups: list[tuple[str, int]] = []
        self.ends: list[tuple[int, str, str, str]] = []
        """Of the newest: time in ms, id, state, class."""
        self.ends_cut = False
        self.left_out: set[str] = set()
        self.jobs = self.tokens = self.delayed = self.leased = self.dead = 0
        self.scheduler = SchedulerStatus(
            model=keys.model, partition=keys.partition, active=None
        )
        self.classes: list[Waiting] = []
        self.tenants: list[Waiting] = []
        self.queues: list[QueueDepth] = []
        self.groups: list[GroupStatus] = []

    # --- first turn ---------------------------------------------------------------
    def first(self) -> list[Command]:
        """Returns what is asked first."""
        k, share = self.keys, self._share
        fields = [*_LOAD]
        for name in CLASSES:
            fields += [f"class:{name}:{part}" for part in _CLASS_LOAD]
            fields.append(f"later:class:{name}:jobs")
        return [
            ("HMGET", k.load, *fields),
            ("HSCAN", k.load, 0, "MATCH", "*tenant:*", "COUNT", 6 * share.tenants),
            ("ZRANGE", k.lanes, 0, share.lanes, "WITHSCORES"),
            ("XLEN", k.resume),
            ("XRANGE", k.resume, "-", "+", "COUNT", 1),
            ("ZCARD", k.delayed),
            ("ZCARD", k.lease),
            ("XLEN", k.dead),
            ("ZREVRANGE", k.groups, 0, share.groups, "WITHSCORES"),
            ("HMGET", k.scheduler, "owner", "until"),
            ("XREVRANGE", k.done, "+", self._since_ms, "COUNT", share.ends + 1),
        ]

    def take_first(self, replies: Sequence[Any], now_ms: int) -> None:
        """Takes the replies to `first`, in order."""
        load, tenants, lanes, resumed, oldest, delayed, leased, dead = replies[:8]
        groups, scheduler, done = replies[8:]
        self._take_load(load if isinstance(load, list) else [])
        self._take_tenants(tenants)
        share = self._share
        self._lanes = [(text(name), whole(at)) for name, at in pairs(lanes)]
        self._groups = [(text(name), whole(at)) for name, at in pairs(groups)]
        for name, found, most in (
            ("lanes", self._lanes, share.lanes),
            ("groups", self._groups, share.groups),
        ):
            if len(found) > most:
                self.left_out.add(name)
                del found[most:]
        self.delayed, self.leased, self.dead = map(whole, (delayed, leased, dead))
        if whole(resumed):
            first = rows(oldest)
            waited = max(0, now_ms - ms_of(first[0][0])) if first else None
            self.queues.append(self._depth("", "resume", whole(resumed), waited))
        owner, until = scheduler if isinstance(scheduler, list) else (None, None)
        if whole(until) > now_ms:
            self.scheduler = msgspec.structs.replace(self.scheduler, active=text(owner))
        self._take_done(done)

    def _take_load(self, values: Sequence[object]) -> None:
        counts = [max(0, whole(value)) for value in values] or [0] * 9
        self.jobs, self.tokens, _ = counts[:3]
        for index, name in enumerate(CLASSES):
            jobs, tokens, later = counts[3 + 3 * index : 6 + 3 * index]
            self.classes.append(
                Waiting(name=name, jobs=jobs, tokens=tokens, later_jobs=later)
            )

    def _take_tenants(self, reply: object) -> None:
        if not isinstance(reply, tuple):
            return
        cursor, fields = reply
        if cursor:
            self.left_out.add("tenants")
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for field, value in fields.items():
            head, _, rest = text(field).partition("tenant:")
            tenant, _, part = rest.rpartition(":")
            found[tenant][head + part] = max(0, whole(value))
        self.tenants = [
            Waiting(
                name=tenant,
                jobs=counts["jobs"],
                tokens=counts["tokens"],
                later_jobs=counts["later:jobs"],
            )
            for tenant, counts in found.items()
        ]

    def _take_done(self, done: object) -> None:
        entries = rows(done)
        self.ends_cut = len(entries) > self._share.ends > 0
        self.ends = [
            (ms_of(name), *(text(fields.get(f)) for f in (b"id", b"state", b"class")))  # type: ignore[misc]
            for name, fields in entries[: self._share.ends]
        ]

    # --- second turn ---------------------------------------------------------------
    def second(self) -> list[Command]:
        """Returns what is asked then; ended jobs apart (`end_command`)."""
        k = self.keys
        return [
            *(("XLEN", f"{k.prefix}q:{lane}") for lane, _ in self._lanes),
            *(("HGETALL", k.group(name)) for name, _ in self._groups),
        ]

    def take_second(self, replies: Sequence[Any], now_ms: int) -> None:
        """Takes the replies to `second`, in order."""
        self._take_lanes(replies[: len(self._lanes)], now_ms)
        rest = replies[len(self._lanes) :]
        for (name, beat_ms), row in zip(self._groups, rest, strict=True):
            age_ms = max(0, now_ms - beat_ms)
            self.groups.append(self._group(name, age_ms, row))

    def _take_lanes(self, lengths: Sequence[object], now_ms: int) -> None:
        depth: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], int] = {}
        for (lane, since_ms), length in zip(self._lanes, lengths, strict=True):
            job_class, _, rest = lane.partition(":")
            place = (job_class, rest.rpartition(":")[0])
            jobs = whole(length)
            if jobs:
                depth[place] += jobs
                oldest[place] = min(since_ms, oldest.get(place, since_ms))
        self.queues += [
            self._depth(*place, jobs, max(0, now_ms - oldest[place]))
            for place, jobs in sorted(depth.items())
        ]

    def _depth(
        self, job_class: str, bucket: str, jobs: int, oldest_ms: int | None
    ) -> QueueDepth:
        return QueueDepth(
            model=self.keys.model,
            partition=self.keys.partition,
            job_class=job_class,
            bucket=bucket,
            jobs=jobs,
            oldest_ms=oldest_ms,
        )

    def _group(self, name: str, age_ms: int, row: object) -> GroupStatus:
        silent = GroupStatus(
            group=name,
            model=self.keys.model,
            partition=self.keys.partition,
            state="silent",
            age_ms=age_ms,
        )
        if not isinstance(row, dict) or not row:
            return silent
        try:
            info = group_info(row)
        except (ProtocolError, ValueError):
            return silent  # a stranger's hash; the scheduler's log names it
        return _status(silent, info, info.counters or EngineCounters())

    def rate(self, now_ms: int) -> tuple[float, float]:
        """Returns how many jobs ended a second, and how many of them failed."""
        ends = [(at, state) for at, _, state, _ in self.ends]
        return rate_of(ends, now_ms, cut=self.ends_cut)

    # --- ended jobs ----------------------------------------------------------------
    def end_command(self, job_id: str) -> Command:
        """Returns the read whose reply `ended` takes."""
        return ("HMGET", self.keys.job(job_id), *_ENDED)


def _status(
    status: GroupStatus, info: GroupInfo, counted: EngineCounters
) -> GroupStatus:
    pool, free = counted.pool_blocks, counted.free_blocks
    if not pool:  # a worker that says nothing of its engine: what is promised to it
        pool, free = info.total_blocks, info.credit_blocks
    a, b = info.step_fit_ms
    asked = counted.prefix_tokens_asked
    return msgspec.structs.replace(
        status,
        state=info.state,
        serves=info.serves,
        tp=info.tp,
        running=counted.num_running,
        max_running=info.max_running,
        pool_blocks=pool,
        used_blocks=max(0, pool - free),
        cached_blocks=counted.cached_blocks,
        free_blocks=max(0, free - counted.cached_blocks),
        step_ms=max(0.0, a + b * counted.num_running),
        steps=counted.steps,
        scheduled_tokens=counted.scheduled_tokens,
        output_tokens=info.output_tokens,
        tokens_per_s=info.tokens_per_s,
        prefill_backlog=counted.prefill_backlog,
        preemptions=counted.preemptions,
        prefix_hit_rate=counted.prefix_tokens_hit / asked if asked else None,
    )


def ended(end: tuple[int, str, str, str], record: object) -> Ended:
    """Returns a job that ended.

    Args:
        end: Time, id, state and class, from the stream of ends.
        record: The reply to `ShardView.end_command`.
    """
    at_ms, _, state, job_class = end
    values = record if isinstance(record, list) else [None] * len(_ENDED)
    enqueued, first, finished = map(moment, values)
    return Ended(
        at_ms=at_ms,
        state=state,
        job_class=job_class,
        ttft_ms=_since(enqueued, first),
        total_ms=_since(enqueued, finished),
    )


def _since(enqueued: int | None, at: int | None) -> float | None:
    return None if enqueued is None or at is None else float(max(0, at - enqueued))
