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
from ..shared.transactions import transaction

_SIZES: Final = {
    "blocks": "total_blocks",
    "running": "max_running",
    "tokens": "batch_tokens",
}
_FIELDS: Final = (
    *("state", "owner", "class", "alone", "credit_tokens_back"),
    *("cost_blocks", "cost_running", "cost_tokens"),
)
PAGE_JOBS: Final = 500
"""Records read in one round trip."""
_log = structlog.get_logger(__name__)


async def mend_books(client: "redis.asyncio.Redis", keys: Keys) -> int:
    """Sets the books of every group right; to be called once orphans are mended.

    Returns:
        How many groups had wrong ones.
    """
    names = cast("list[bytes]", await client.zrange(keys.groups, 0, -1))
    mended = 0
    for name in await _likely_wrong(client, keys, list(map(text, names))):
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


async def _likely_wrong(
    client: "redis.asyncio.Redis", keys: Keys, names: Sequence[str]
) -> list[str]:
    """Returns the groups whose books seem wrong, from one read of all leases.

    Only these are worth a closer look. A group whose hash changes while the leases are
    read is left to the next sweep.
    """
    before = await _rows(client, keys, names)
    jobs = await _jobs_by_owner(client, keys)
    after = await _rows(client, keys, names)
    return [
        name
        for name in names
        if (row := after[name]) is None
        or (before[name] == row and _differs(row, _books(row, jobs.get(name, {}))))
    ]


async def _rows(
    client: "redis.asyncio.Redis", keys: Keys, names: Sequence[str]
) -> dict[str, dict[str, str] | None]:
    """Reads the groups' hashes; None for a key that is no hash."""
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.hgetall(keys.group(name))
    replies = await pipe.execute(raise_on_error=False)
    return {
        name: None if isinstance(reply, Exception) else _row(reply)
        for name, reply in zip(names, replies, strict=True)
    }


def _row(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in raw.items()}


def _differs(row: Mapping[str, str], right: Mapping[str, str]) -> dict[str, str]:
    """What stands in a group's hash where something else should."""
    return {name: row[name] for name in right if row.get(name) != right[name]}


async def _mend(
    client: "redis.asyncio.Redis", keys: Keys, group: str
) -> dict[str, str]:
    """Mends one group; what was wrong.

    Whatever takes credit or gives it back writes the group's hash in the same script,
    so that books watched while the records are read belong to these records.
    """
    async with transaction(client) as pipe:
        await pipe.watch(keys.group(group))
        row = _row(await pipe.hgetall(keys.group(group)))  # type: ignore[misc]
        if not row:
            return {}
        right = _books(row, (await _jobs_by_owner(client, keys)).get(group, {}))
        wrong = _differs(row, right)
        if wrong:
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hset(keys.group(group), mapping=dict(right))
            pipe.publish(keys.bell, "room")
            await pipe.execute()
        return wrong


async def _jobs_by_owner(
    client: "redis.asyncio.Redis", keys: Keys
) -> dict[str, dict[str, dict[str, str]]]:
    """Reads every job under lease: group -> job id -> what it holds."""
    members = cast("list[bytes]", await client.zrange(keys.lease, 0, -1))
    found: dict[str, dict[str, dict[str, str]]] = {}
    for first in range(0, len(members), PAGE_JOBS):
        names = [text(member) for member in members[first : first + PAGE_JOBS]]
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.hmget(keys.job(name), list(_FIELDS))
        rows = await pipe.execute(raise_on_error=False)
        for name, row in zip(names, rows, strict=True):
            if isinstance(row, Exception):
                continue  # a stranger's key is no job
            job = dict(zip(_FIELDS, map(text, row), strict=True))
            if job["state"] in ACTIVE:
                found.setdefault(job["owner"], {})[name] = job
    return found


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
