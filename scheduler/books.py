"""Mending the books of worker groups: credit that no job holds, and none that does.

A record that a stranger spoilt takes its job's credit along, and a group that seems to
run a job alone would refuse all others for ever. The books are what the records of the
jobs under lease say.
"""

from collections.abc import Mapping, Sequence
from typing import Final, cast

import redis.asyncio
import redis.exceptions
import structlog

from ..shared.keys import Keys
from ..shared.lifecycle import ACTIVE
from ..shared.script_runner import count_of, text

_SIZES: Final = {
    "blocks": "total_blocks",
    "running": "max_running",
    "tokens": "batch_tokens",
}
_FIELDS: Final = (
    *("state", "owner", "class", "alone", "credit_tokens_back"),
    *("cost_blocks", "cost_running", "cost_tokens"),
)
_log = structlog.get_logger(__name__)


async def mend_books(client: "redis.asyncio.Redis", keys: Keys) -> int:
    """Sets the books of every group right; to be called once orphans are mended.

    Returns:
        How many groups had wrong ones.
    """
    names = cast("list[bytes]", await client.zrange(keys.groups, 0, -1))
    mended = 0
    for name in map(text, names):
        try:
            wrong = await _mend(client, keys, name)
        except redis.exceptions.WatchError:
            continue  # it took or gave back work meanwhile; the next sweep looks again
        except redis.exceptions.ResponseError as error:
            _log.warning("group_unreadable", group=name, error=str(error))
            continue
        if wrong:
            mended += 1
            _log.warning("books_mended", shard=keys.shard, group=name, were=wrong)
    return mended


async def _mend(
    client: "redis.asyncio.Redis", keys: Keys, group: str
) -> dict[str, str]:
    """Mends one group; what was wrong.

    Whatever takes credit or gives it back writes the group's hash in the same script,
    so that books watched while the records are read belong to these records.
    """
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(keys.group(group))
        raw = await pipe.hgetall(keys.group(group))  # type: ignore[misc]
        row = {text(name): text(value) for name, value in raw.items()}
        if not row:
            return {}
        right = _books(row, await _jobs_of(pipe, keys, group))
        wrong = {name: row[name] for name in right if row.get(name) != right[name]}
        if wrong:
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hset(keys.group(group), mapping=dict(right))
            pipe.publish(keys.bell, "room")
            await pipe.execute()
        return wrong


async def _jobs_of(
    pipe: "redis.asyncio.client.Pipeline", keys: Keys, group: str
) -> dict[str, dict[str, str]]:
    members = cast("list[bytes]", await pipe.zrange(keys.lease, 0, -1))
    jobs: dict[str, dict[str, str]] = {}
    for member in map(text, members):
        try:
            row = await pipe.hmget(keys.job(member), list(_FIELDS))  # type: ignore[misc]
        except redis.exceptions.ResponseError:
            continue  # a stranger's key is no job
        job = dict(zip(_FIELDS, map(text, row), strict=True))
        if job["state"] in ACTIVE and job["owner"] == group:
            jobs[member] = job
    return jobs


def _books(
    row: Mapping[str, str], jobs: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """What the group's hash should say, as far as it keeps such books."""
    held = list(map(_held, jobs.values()))
    bulk = [_held(job) for job in jobs.values() if job["class"] == "bulk"]
    books = {
        f"credit_{name}": str(count_of(row.get(size, "")) - _sum(held, name))
        for name, size in _SIZES.items()
    }
    books |= {f"bulk_{name}": str(_sum(bulk, name)) for name in _SIZES}
    books["alone"] = next((j for j, job in jobs.items() if job["alone"] == "1"), "")
    return {name: value for name, value in books.items() if name in row}


def _held(job: Mapping[str, str]) -> dict[str, int]:
    given_back = job["credit_tokens_back"] == "1"
    return {
        "blocks": count_of(job["cost_blocks"]),
        "running": count_of(job["cost_running"] or "1"),
        "tokens": 0 if given_back else count_of(job["cost_tokens"]),
    }


def _sum(held: Sequence[Mapping[str, int]], name: str) -> int:
    return sum(one[name] for one in held)
