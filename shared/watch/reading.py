"""Takes a snapshot of a pool: three round trips, however much waits.

What is asked has a bound; where there is more, `PoolSnapshot.left_out` names it.
Totals (jobs, tokens, per class) are exact in any case: scripts keep them.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from typing import Any, Final

import msgspec

from ..clock import time_ms
from ..keys import PROCESSES, SHARDS, Keys, is_shard, process_key
from ..process_card import ProcessCard
from .replies import Command, Read, text
from .shard import CLASSES, ShardView, Share, ended
from .snapshot import GroupStatus, PoolSnapshot, Rates, Waiting
from .statistics import Ended, latency_of

MOST_SHARDS: Final = 256
MOST_LANES: Final = 1024
MOST_GROUPS: Final = 256
MOST_ENDS: Final = 512
MOST_TENANTS: Final = 64
MOST_PROCESSES: Final = 256
RECENT_MS: Final = 300_000
"""Ends older than this say nothing of how it is now."""


class PoolReader:
    """Takes snapshots; keeps what it has read of jobs that ended, which never changes.

    Args:
        read: Sends commands in one round trip.
        recent_ms: How far back ends are looked at for percentiles.
        most_ends: How many ends are looked at; 0 takes no percentiles and no rates.
        most_lanes: How many lanes are looked at, over all shards.
    """

    def __init__(
        self,
        read: Read,
        *,
        recent_ms: int = RECENT_MS,
        most_ends: int = MOST_ENDS,
        most_lanes: int = MOST_LANES,
    ) -> None:
        self._read = read
        self._recent_ms = recent_ms
        self._most_ends = most_ends
        self._most_lanes = most_lanes
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    async def snapshot(self, only: Collection[str] | None = None) -> PoolSnapshot:
        """Returns the pool as it is now.

        Args:
            only: Shards to look at, by name; None takes all.

        Raises:
            RedisError: Redis did not answer.
        """
        now_ms, views, members, left_out = await self._places(only)
        commands = [command for view in views for command in view.first()]
        replies = await self._read(*commands)
        for view in views:
            count = len(view.first())
            view.take_first(replies[:count], now_ms)
            replies = replies[count:]
        cards = await self._details(views, members, now_ms)
        for view in views:
            left_out |= view.left_out
        return self._assemble(now_ms, views, cards, left_out)

    async def _places(
        self, only: Collection[str] | None
    ) -> tuple[int, list[ShardView], list[str], set[str]]:
        """Returns the time, the shards, the processes, and what was too much."""
        time, shards, processes = await self._read(
            ("TIME",),
            ("SMEMBERS", SHARDS),
            ("ZREVRANGE", PROCESSES, 0, MOST_PROCESSES),
        )
        now_ms = time_ms(time)
        names = sorted(filter(is_shard, map(text, _members(shards))))
        if only is not None:
            names = [name for name in names if name in only]
        # Of a part nobody asks who there is; its user may not even read that.
        asked = _members(processes) if only is None else []
        members = [text(member) for member in asked]
        left_out = {
            kind
            for kind, found, most in (
                ("shards", names, MOST_SHARDS),
                ("processes", members, MOST_PROCESSES),
            )
            if len(found) > most
        }
        names, members = names[:MOST_SHARDS], members[:MOST_PROCESSES]
        parts = max(1, len(names))
        share = Share(
            lanes=max(16, self._most_lanes // parts),
            groups=max(4, MOST_GROUPS // parts),
            ends=max(16, self._most_ends // parts) if self._most_ends else 0,
            tenants=MOST_TENANTS,
        )
        since_ms = now_ms - self._recent_ms
        views = [ShardView(Keys.of_shard(name), share, since_ms) for name in names]
        return now_ms, views, members, left_out

    async def _details(
        self, views: list[ShardView], members: list[str], now_ms: int
    ) -> list[ProcessCard]:
        """Reads lanes, groups, jobs that ended, and cards, in one round trip."""
        new = [
            (view, end)
            for view in views
            for end in view.ends
            if end[1] not in self._ended
        ]
        commands: list[Command] = [("GET", process_key(member)) for member in members]
        commands += [view.end_command(end[1]) for view, end in new]
        for view in views:
            commands += view.second()
        replies = await self._read(*commands) if commands else []
        cards, replies = replies[: len(members)], replies[len(members) :]
        for (_, end), record in zip(new, replies[: len(new)], strict=True):
            self._ended[end[1]] = ended(end, record)
        replies = replies[len(new) :]
        for view in views:
            count = len(view.second())
            view.take_second(replies[:count], now_ms)
            replies = replies[count:]
        keep = max(2 * MOST_ENDS, sum(len(view.ends) for view in views))
        while len(self._ended) > keep:
            self._ended.popitem(last=False)
        return [card for raw in cards if (card := _card(raw)) is not None]

    def _assemble(
        self,
        now_ms: int,
        views: list[ShardView],
        cards: list[ProcessCard],
        left_out: set[str],
    ) -> PoolSnapshot:
        ends = [end for view in views for end in view.ends]
        ended = [job for end in ends if (job := self._ended.get(end[1])) is not None]
        groups = tuple(group for view in views for group in view.groups)
        tenants = _sums([one for view in views for one in view.tenants])
        tenants.sort(key=lambda one: (-one.jobs, -one.later_jobs, one.name))
        if len(tenants) > MOST_TENANTS:
            left_out.add("tenants")
        return PoolSnapshot(
            at_ms=now_ms,
            queues=tuple(queue for view in views for queue in view.queues),
            waiting_jobs=sum(view.jobs for view in views),
            waiting_tokens=sum(view.tokens for view in views),
            classes=tuple(
                _sums(
                    [Waiting(name=name, jobs=0, tokens=0) for name in CLASSES]
                    + [one for view in views for one in view.classes]
                )
            ),
            tenants=tuple(tenants[:MOST_TENANTS]),
            delayed=sum(view.delayed for view in views),
            leased=sum(view.leased for view in views),
            groups=groups,
            schedulers=tuple(view.scheduler for view in views),
            dead_letters=sum(view.dead for view in views),
            processes=tuple(sorted(cards, key=lambda card: (card.kind, card.id))),
            rates=_rates(views, groups, now_ms),
            latency=latency_of(ended),
            latency_by_class={
                name: latency_of(job for job in ended if job.job_class == name)
                for name in CLASSES
            },
            left_out=tuple(sorted(left_out)),
        )


def _rates(
    views: list[ShardView], groups: tuple[GroupStatus, ...], now_ms: int
) -> Rates:
    rates = [view.rate(now_ms) for view in views]
    return Rates(
        jobs_per_s=sum(jobs for jobs, _ in rates),
        failed_per_s=sum(failed for _, failed in rates),
        tokens_per_s=sum(
            group.tokens_per_s for group in groups if group.state != "silent"
        ),
    )


def _members(reply: object) -> list[Any]:
    return list(reply) if isinstance(reply, list | set) else []


def _card(raw: object) -> ProcessCard | None:
    """A process's card; None of one that has expired or that a stranger wrote."""
    if not isinstance(raw, bytes):
        return None
    try:
        return msgspec.json.decode(raw, type=ProcessCard)
    except msgspec.DecodeError:
        return None


def _sums(parts: list[Waiting]) -> list[Waiting]:
    """Joins what different shards have of the same name, in order of appearance."""
    jobs: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    later: Counter[str] = Counter()
    for part in parts:
        jobs[part.name] += part.jobs
        tokens[part.name] += part.tokens
        later[part.name] += part.later_jobs
    return [
        Waiting(name=name, jobs=jobs[name], tokens=tokens[name], later_jobs=later[name])
        for name in jobs
    ]
