"""What the janitor does in Redis: trimming, forgetting groups, mending orphans.

An orphan is a job whose record and place disagree, as after a restart of Redis that
lost its last writes: active without a lease, waiting without an entry. Each is mended
in a transaction that watches its record, so that no transition is undone.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, cast

import redis.asyncio
import redis.exceptions
import structlog

from ..shared.clock import redis_ms
from ..shared.keys import SHARDS, Keys, is_shard
from ..shared.lifecycle import ACTIVE, State
from ..shared.script_runner import text
from ..shared.script_types import DEAD_MS
from ..shared.scripts import Scripts
from ..shared.transactions import transaction

DONE_AGE_MS: Final = 86_400_000
"""Terminal events are kept for a day."""
SILENT_GROUP_MS: Final = 600_000
"""A group without hash and heartbeat for this long is removed."""
SCAN_COUNT: Final = 500
SCAN_PAUSE_S: Final = 0.01
"""Between two parts of a scan: the queue comes first."""
_PLACE_FIELDS: Final = ("state", "entry_key", "entry")
_ENTRY_FIELDS: Final = (
    *("tokens", "max_tokens", "priority", "deadline", "tenant", "bytes"),
    *("class", "bucket", "enqueued_ms"),
)
_log = structlog.get_logger(__name__)


async def shards(client: "redis.asyncio.Redis") -> list[Keys]:
    """Returns the names of every shard, in order."""
    return shards_of(cast("set[bytes]", await client.smembers(SHARDS)))  # type: ignore[misc]


def shards_of(members: Iterable[bytes]) -> list[Keys]:
    """Returns the names of the shards that the set of shards holds, in order."""
    names = sorted(member.decode(errors="replace") for member in members)
    return [Keys.of_shard(name) for name in names if is_shard(name)]


async def trim(
    client: "redis.asyncio.Redis", keys: Keys, dead_ms: int = DEAD_MS
) -> dict[str, int]:
    """Removes old dead letters, with what they kept, old terminal events, and from
    the list of newest jobs those whose records have gone.

    Args:
        client: Redis.
        keys: The shard's names.
        dead_ms: How long dead letters are kept.

    Returns:
        How many entries of each went.
    """
    now, scripts = await redis_ms(client), Scripts(client, keys)
    old = [one for one in await scripts.letters() if one.at_ms < now - dead_ms]
    dead = await scripts.purge_letters(old)
    done = await client.xtrim(
        keys.done, minid=str(now - DONE_AGE_MS), approximate=False
    )
    gone = await _forget_listed(client, keys)
    return {"dead_letters": dead, "events": int(done), "listed": gone}


async def _forget_listed(client: "redis.asyncio.Redis", keys: Keys) -> int:
    """Removes jobs without a record from the list of newest ones; their number.

    A bulk run's records go with its results: thousands of names would be asked for in
    vain by whoever lists jobs.
    """
    names = cast("list[bytes]", await client.zrange(keys.recent, 0, -1))
    num_gone = 0
    for start in range(0, len(names), SCAN_COUNT):
        some = names[start : start + SCAN_COUNT]
        pipe = client.pipeline(transaction=False)
        for name in some:
            pipe.exists(keys.job(name.decode(errors="replace")))
        there = await pipe.execute()
        gone = [
            name for name, is_there in zip(some, there, strict=True) if not is_there
        ]
        if gone:
            num_gone += int(await client.zrem(keys.recent, *gone))
        await asyncio.sleep(SCAN_PAUSE_S)
    return num_gone


async def forget_groups(client: "redis.asyncio.Redis", keys: Keys) -> int:
    """Removes groups that have expired and been silent for long; their number."""
    oldest = await redis_ms(client) - SILENT_GROUP_MS
    silent = cast(
        "list[bytes]", await client.zrangebyscore(keys.groups, "-inf", oldest)
    )
    scripts, removed = Scripts(client, keys), 0
    for group in (name.decode(errors="replace") for name in silent):
        if not await client.exists(keys.group(group)):
            await scripts.leave(group)
            removed += 1
    return removed


async def mend_orphans(client: "redis.asyncio.Redis", keys: Keys) -> dict[str, int]:
    """Puts every job back where its record says it is.

    Returns:
        How many jobs were mended, by the state they were in.
    """
    mended: Counter[str] = Counter()
    async for job_ids in _pages(client, keys):
        for job_id in await _likely_orphans(client, keys, job_ids):
            state = await _mend(client, keys, job_id)
            if state is not None:
                mended[state] += 1
                _log.warning("orphan_mended", job=job_id, state=state)
    return dict(mended)


async def _pages(client: "redis.asyncio.Redis", keys: Keys) -> AsyncIterator[list[str]]:
    """Yields the ids of all jobs with a record, some at a time."""
    prefix, cursor = keys.job(""), 0
    while True:
        cursor, names = await client.scan(cursor, match=f"{prefix}*", count=SCAN_COUNT)
        yield [name.decode(errors="replace").removeprefix(prefix) for name in names]
        if not cursor:
            return
        await asyncio.sleep(SCAN_PAUSE_S)


async def _likely_orphans(
    client: "redis.asyncio.Redis", keys: Keys, job_ids: Sequence[str]
) -> list[str]:
    """Returns the jobs that seem to be nowhere, in two round trips for all.

    Only these are worth a transaction each: some have merely moved between the reads.
    """
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hmget(keys.job(job_id), list(_PLACE_FIELDS))
    rows = await pipe.execute(raise_on_error=False)
    asked: list[str] = []
    likely: list[str] = []
    pipe = client.pipeline(transaction=False)
    for job_id, row in zip(job_ids, rows, strict=True):
        if isinstance(row, Exception):
            likely.append(job_id)  # the closer look says what is wrong with it
            continue
        state, stream, entry = (text(value) for value in row)
        if state in ACTIVE:
            pipe.zscore(keys.lease, job_id)
        elif state in (State.DELAYED, State.RETRYING):
            pipe.zscore(keys.delayed, job_id)
        elif state == State.QUEUED and stream and entry:
            pipe.xrange(stream, entry, entry)
        elif state == State.QUEUED:
            likely.append(job_id)
            continue
        else:
            continue
        asked.append(job_id)
    places = await pipe.execute(raise_on_error=False) if asked else []
    for job_id, place in zip(asked, places, strict=True):
        if place is None or place == [] or isinstance(place, Exception):
            likely.append(job_id)
    return likely


async def _mend(client: "redis.asyncio.Redis", keys: Keys, job_id: str) -> str | None:
    """Mends one job; its state when there was something to mend."""
    async with transaction(client) as pipe:
        try:
            # Watching `resume` as well: the new entry's id is chosen here.
            await pipe.watch(keys.job(job_id), keys.resume)
            raw = await pipe.hgetall(keys.job(job_id))  # type: ignore[misc]
            record = {k.decode(): v.decode(errors="replace") for k, v in raw.items()}
            if not await _is_orphan(pipe, keys, job_id, record):
                return None
            state, now = str(record["state"]), await redis_ms(client)
            entry_id = await _next_id(pipe, keys.resume, now)
            pipe.multi()  # type: ignore[no-untyped-call]
            if state == State.QUEUED:
                entry = {"id": job_id, "kind": "orphan"}
                entry |= {name: record.get(name, "") for name in _ENTRY_FIELDS}
                entry["priority"] = record.get("priority", "0")
                entry["losses"] = record.get("lease_losses", "0")
                entry["started"] = "1" if record.get("first_ms") else "0"
                pipe.xadd(keys.resume, entry, id=entry_id)  # type: ignore[arg-type]
                place = {"entry": entry_id, "entry_key": keys.resume}
                pipe.hset(keys.job(job_id), mapping=place)
                pipe.publish(keys.bell, "orphan")
            else:
                due = keys.lease if state in ACTIVE else keys.delayed
                pipe.zadd(due, {job_id: now}, nx=True)
            await pipe.execute()
        except redis.exceptions.WatchError:
            return None  # something moved meanwhile; the next sweep looks again
        except redis.exceptions.ResponseError as error:
            _log.warning("record_unreadable", job=job_id, error=str(error))
            return None
        return state


async def _next_id(pipe: "redis.asyncio.client.Pipeline", stream: str, now: int) -> str:
    """An id that the stream will accept."""
    if not await pipe.exists(stream):
        return f"{now}-0"
    last = (await pipe.xinfo_stream(stream))["last-generated-id"].decode()
    milliseconds, _, sequence = last.partition("-")
    if int(milliseconds) < now:
        return f"{now}-0"
    return f"{milliseconds}-{int(sequence) + 1}"


async def _is_orphan(
    pipe: "redis.asyncio.client.Pipeline",
    keys: Keys,
    job_id: str,
    record: dict[str, str],
) -> bool:
    state = record.get("state", "")
    if state in ACTIVE:
        return await pipe.zscore(keys.lease, job_id) is None
    if state in (State.DELAYED, State.RETRYING):
        return await pipe.zscore(keys.delayed, job_id) is None
    if state != State.QUEUED:
        return False
    stream, entry = record.get("entry_key", ""), record.get("entry", "")
    if not stream or not entry:
        return True
    return not await pipe.xrange(stream, entry, entry)
