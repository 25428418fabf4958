"""Which versions of a model have live worker groups, and what still belongs to them."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, cast

import msgspec
import redis.asyncio

from .keys import Keys
from .messages import DEFAULT_VERSION
from .redis import translate
from .script_runner import count_of, text
from .shadow_keys import SHADOW_TENANT

_FIELDS: Final = (
    *("version", "weights_version", "state"),
    *("max_running", "credit_running"),
)
_MOST_OPEN: Final = 5000
"""Jobs of one place that are looked at."""
_MOST_SEEN: Final = 20_000
"""Waiting jobs of a shard that are looked at to be counted."""


class LiveGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group that is alive."""

    group: str
    partition: int
    version: str
    weights_version: str
    draining: bool
    running: int
    """Sequences that it holds, of dispatched jobs too."""


async def live_groups(
    client: "redis.asyncio.Redis", model: str, partitions: int
) -> list[LiveGroup]:
    """Returns the live groups of a model, all versions, in two round trips.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
        partitions: How many the pool has.
    """
    shards = [Keys(model, partition) for partition in range(partitions)]
    with translate():
        pipe = client.pipeline(transaction=False)
        for keys in shards:
            pipe.zrange(keys.groups, 0, -1)
        members = await pipe.execute()
        named = [
            (keys, text(name))
            for keys, names in zip(shards, members, strict=True)
            for name in names
        ]
        pipe = client.pipeline(transaction=False)
        for keys, name in named:
            pipe.hmget(keys.group(name), list(_FIELDS))
        rows = await pipe.execute(raise_on_error=False) if named else []
    return [
        _group(keys, name, row)
        for (keys, name), row in zip(named, rows, strict=True)
        if isinstance(row, list) and row[1] is not None  # else it has expired
    ]


def _group(keys: Keys, name: str, row: Sequence[object]) -> LiveGroup:
    version, weights, state, most, free = map(text, row)
    return LiveGroup(
        group=name,
        partition=keys.partition,
        version=version or DEFAULT_VERSION,
        weights_version=weights,
        draining=state == "draining",
        running=max(count_of(most) - count_of(free), 0),
    )


def serving_partitions(groups: Sequence[LiveGroup], version: str) -> frozenset[int]:
    """Returns the partitions in which a version has a group that takes jobs."""
    return frozenset(
        one.partition for one in groups if one.version == version and not one.draining
    )


async def begun_elsewhere(
    client: "redis.asyncio.Redis", keys: Keys, weights_version: str, group: str
) -> int:
    """Counts jobs of a shard that were begun with some weights and have not ended.

    They wait for another attempt, or hang on a group that died: on these weights alone
    can they end.

    Args:
        client: Redis; replies are bytes.
        keys: The shard's names.
        weights_version: The weights.
        group: Whose jobs are not counted: it knows of its own; '' is nobody.
    """
    with translate():
        pipe = client.pipeline(transaction=False)
        pipe.zrange(keys.lease, 0, _MOST_OPEN)
        pipe.zrange(keys.delayed, 0, _MOST_OPEN)
        pipe.xrange(keys.resume, count=_MOST_OPEN)
        leased, delayed, entries = await pipe.execute()
        waiting = [fields.get(b"id", b"") for _, fields in entries]
        job_ids = {text(name) for name in (*leased, *delayed, *waiting)} - {""}
        pipe = client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hmget(keys.job(job_id), ["weights", "owner"])
        rows = await pipe.execute(raise_on_error=False) if job_ids else []
    wanted, own = weights_version.encode(), group.encode()
    return sum(
        row[0] == wanted and not (own and row[1] == own)
        for row in cast("list[object]", rows)
        if isinstance(row, list)
    )


async def open_job(client: "redis.asyncio.Redis", keys: Keys) -> str | None:
    """Returns a job of a shard that waits or that a group has, if there is any.

    Copies that wait are left out, which end by themselves.

    Args:
        client: Redis; replies are bytes.
        keys: The shard's names.
    """
    with translate():
        for name in await client.zrange(keys.lease, 0, 0):
            return text(name)
    return await waiting_job(client, keys)


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that are for one version alone."""

    running: int = 0
    """Given to a group and not ended."""
    waiting: int = 0


async def pinned_jobs(
    client: "redis.asyncio.Redis", keys: Keys, version: str
) -> Pinned:
    """Counts the jobs of a shard that are for one version alone, of some thousands.

    Args:
        client: Redis; replies are bytes.
        keys: The shard's names.
        version: The version.
    """
    with translate():
        leased = await client.zrange(keys.lease, 0, _MOST_OPEN)
        running = await _pinned_of(client, keys, map(text, leased), version)
        waiting = seen = 0
        async for job_ids in _waiting(client, keys):
            waiting += await _pinned_of(client, keys, job_ids, version)
            seen += len(job_ids)
            if seen >= _MOST_SEEN:
                break
    return Pinned(running=running, waiting=waiting)


async def _pinned_of(
    client: "redis.asyncio.Redis", keys: Keys, job_ids: Iterable[str], version: str
) -> int:
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hmget(keys.job(job_id), ["version"])
    pins = await pipe.execute(raise_on_error=False) if len(pipe) else []
    return sum(pin == [version.encode()] for pin in pins)


async def waiting_job(
    client: "redis.asyncio.Redis", keys: Keys, version: str | None = None
) -> str | None:
    """Returns a job of a shard that waits, for one version alone, if there is any.

    Copies are left out, which end by themselves.

    Args:
        client: Redis; replies are bytes.
        keys: The shard's names.
        version: The version; None: any job.
    """
    wanted, copies = (version or "").encode(), SHADOW_TENANT.encode()
    with translate():
        async for job_ids in _waiting(client, keys):
            pipe = client.pipeline(transaction=False)
            for job_id in job_ids:
                pipe.hmget(keys.job(job_id), ["version", "tenant"])
            pins = await pipe.execute(raise_on_error=False) if job_ids else []
            for job_id, pin in zip(job_ids, pins, strict=True):
                if not isinstance(pin, list) or pin == [None, None] or pin[1] == copies:
                    continue  # a copy, or what is left of a job that has expired
                if version is None or pin[0] == wanted:
                    return job_id
    return None


async def _waiting(
    client: "redis.asyncio.Redis", keys: Keys
) -> AsyncIterator[list[str]]:
    """Yields the jobs of a shard that no group has, some thousands at a time."""
    delayed = [text(name) for name in await client.zrange(keys.delayed, 0, -1)]
    for start in range(0, len(delayed), _MOST_OPEN):
        yield delayed[start : start + _MOST_OPEN]
    lanes = [text(name) for name in await client.zrange(keys.lanes, 0, -1)]
    for stream in (keys.resume, *(f"{keys.prefix}q:{lane}" for lane in lanes)):
        first = "-"
        while page := await client.xrange(stream, min=first, count=_MOST_OPEN):
            yield [text(fields.get(b"id")) for _, fields in page if fields]
            first = f"({text(page[-1][0])}"
