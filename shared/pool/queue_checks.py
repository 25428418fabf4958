"""What `tokenmill doctor` says of a shard's queue: limits, what waits, what died.

Waiting jobs are looked at by sample: the oldest of the oldest lanes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import redis.asyncio

from ..keys import Keys
from ..messages import FIRST_VERSION
from ..redis import Finding
from ..script_types import GroupInfo
from .version_checks import examine_versions, find_stranded

SAMPLE_LANES: Final = 16
SAMPLE_ENTRIES: Final = 64

_Entries = list[tuple[bytes, dict[bytes, bytes]]]


async def examine_queue(
    client: redis.asyncio.Redis,
    keys: Keys,
    groups: Sequence[GroupInfo],
    isolate_after_losses: int,
) -> list[Finding]:
    """Looks at the queue of a shard.

    Args:
        client: Redis.
        keys: The shard's names.
        groups: Its live workers.
        isolate_after_losses: Of the scheduler's settings.
    """
    waiting = await _waiting(client, keys)
    async with client.pipeline(transaction=False) as pipe:
        pipe.hgetall(keys.load)
        pipe.hgetall(keys.limits)
        pipe.xlen(keys.dead)
        pipe.xrevrange(keys.dead, count=1)
        pipe.hget(keys.scheduler, "schema")
        load, limits, num_dead, newest, schema = await pipe.execute()
    found = [_limits(keys, load, limits), _dead(keys, num_dead, newest)]
    found += _suspects(keys, waiting, groups, isolate_after_losses)
    stranded = await find_stranded(client, keys, list(waiting), groups)
    found += await examine_versions(client, keys, groups, stranded)
    versions = await _versions(client, keys, waiting)
    found += _schemas(keys, versions, int(schema or 0), groups)
    return found


async def _waiting(client: redis.asyncio.Redis, keys: Keys) -> dict[str, bytes]:
    """Jobs of the sample with their count of lost leases."""
    lanes = await client.zrange(keys.lanes, 0, SAMPLE_LANES - 1)
    streams = [keys.resume, *(f"{keys.prefix}q:{lane.decode()}" for lane in lanes)]
    pipe = client.pipeline(transaction=False)
    for stream in streams:
        pipe.xrange(stream, count=SAMPLE_ENTRIES)
    jobs: dict[str, bytes] = {}
    for rows in await pipe.execute(raise_on_error=False):
        for _, fields in rows if isinstance(rows, list) else ():
            name = fields.get(b"id", b"").decode(errors="replace")
            jobs[name] = fields.get(b"losses", b"0")
    return jobs


async def _versions(
    client: redis.asyncio.Redis, keys: Keys, waiting: dict[str, bytes]
) -> Counter[int]:
    """How many of these jobs have a record of which schema version."""
    pipe = client.pipeline(transaction=False)
    for name in waiting:
        pipe.hget(keys.job(name), "v")
    found = await pipe.execute(raise_on_error=False) if waiting else []
    versions: Counter[int] = Counter()
    for raw in found:
        if raw is None:
            versions[FIRST_VERSION] += 1
        elif isinstance(raw, bytes) and raw.isdigit():
            versions[int(raw)] += 1  # what is no number, the scheduler ends by name
    return versions


def _limits(
    keys: Keys, load: dict[bytes, bytes], limits: dict[bytes, bytes]
) -> Finding:
    """What waits against what may, and every limit in force."""
    jobs, tokens, later = (
        load.get(name, b"0").decode() for name in (b"jobs", b"tokens", b"later:jobs")
    )
    name = f"queue {keys.shard}"
    if not limits:
        return Finding(
            "warning",
            name,
            f"{jobs} jobs and {tokens} tokens wait, {later} jobs for their time; no "
            "limits are written, so the built-in ones hold",
            "the active scheduler writes them: start one, or upgrade it",
        )
    text = ", ".join(
        f"{field.decode()} {value.decode()}" for field, value in sorted(limits.items())
    )
    waiting = f"{jobs} jobs and {tokens} tokens wait, {later} jobs for their time"
    return Finding("info", name, f"{waiting}; {text}")


def _dead(keys: Keys, num_dead: int, newest: _Entries) -> Finding:
    name = f"dead-letters {keys.shard}"
    if not num_dead:
        return Finding("info", name, "none")
    reason = newest[0][1].get(b"reason", b"unknown").decode(errors="replace")
    return Finding(
        "warning",
        name,
        f"{num_dead} dead letters; the newest: {reason[:160]}",
        "tokenmill dead list, then tokenmill dead requeue or purge",
    )


def _suspects(
    keys: Keys,
    waiting: dict[str, bytes],
    groups: Sequence[GroupInfo],
    isolate_after_losses: int,
) -> list[Finding]:
    """Names jobs that have lost leases often and so wait for an empty worker."""
    suspects = sorted(
        name
        for name, losses in waiting.items()
        if losses.isdigit() and int(losses) >= isolate_after_losses
    )
    if not suspects:
        return []
    return [
        Finding(
            "warning",
            f"suspects {keys.shard}",
            f"{len(suspects)} jobs have each lost several workers and wait to run "
            f"alone; the first: {suspects[0]}; {len(groups)} workers live",
            "nothing at first: one that kills again becomes a dead letter; the logs of "
            "the workers that died say why",
        )
    ]


def _schemas(
    keys: Keys, versions: Counter[int], scheduler: int, groups: Sequence[GroupInfo]
) -> list[Finding]:
    """Names jobs that nobody here reads yet, as during a rolling upgrade."""
    name = f"schema {keys.shard}"
    workers = max((group.schema for group in groups), default=0)
    late = {v: n for v, n in versions.items() if scheduler and v > scheduler}
    late |= {v: n for v, n in versions.items() if workers and v > workers}
    if late:
        newest = max(late)
        return [
            Finding(
                "warning",
                name,
                f"at least {sum(late.values())} jobs wait that have schema version "
                f"{newest}; the active scheduler reads up to {scheduler or 'unknown'}, "
                f"the workers up to {workers or 'unknown'}",
                "upgrade schedulers and workers; the jobs wait meanwhile and are "
                "not lost",
            )
        ]
    seen = sorted({group.schema for group in groups})
    text = f"scheduler {scheduler or 'unknown'}, workers {seen or 'none'}"
    return [Finding("info", name, text)]
