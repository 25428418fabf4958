"""Scripts of the janitor: what time has overtaken, and groups that are dead."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, cast

import msgspec

from .errors import RedisUnsuitable
from .lifecycle import ACTIVE, TERMINAL, State
from .losses import convicted, is_counted, lost, one_line, unstartable
from .messages import EXPIRED, encode
from .redis import translate
from .script_endings import Hint, cancelled, ending
from .script_runner import (
    Argument,
    ScriptRunner,
    broke_on_data,
    chunks,
    count_of,
    number,
    text,
)
from .script_types import DEAD_MS

GROUP_SILENCE_MS: Final = 60_000
"""After this long without a heartbeat a group is looked at, and forgotten when its
hash has expired."""
MAX_START_LOSSES: Final = 5
"""Dispatches in a row that living groups do not start before a job fails."""
_REAP_CHUNK: Final = 64
"""Fewer than elsewhere: each job brings nine keys and may write twenty times."""


class DeadJob(msgspec.Struct, frozen=True):
    """A job that failed since groups were given it too often in vain."""

    job_id: str
    reason: Literal["lease_losses", "start_losses"]
    """Which count reached its bound."""
    losses: int


class ReapReport(msgspec.Struct, frozen=True):
    """What one reap did."""

    redelivered: int = 0
    dead: int = 0
    """Failed, having been given to groups too often in vain; among the dead letters."""
    expired: int = 0
    due: int = 0
    """Delayed and retrying jobs that were queued."""
    cancelled: int = 0
    """Cancel was asked for, then the lease ended."""
    groups: int = 0
    """Silent groups forgotten."""
    dead_jobs: tuple[DeadJob, ...] = ()
    dropped: tuple[str, ...] = ()
    """Jobs whose record Redis could not act on; they are looked at no more."""
    fenced: bool = False
    """Another scheduler is active; nothing was done."""


_Row = tuple[str, Hint, str]
"""A job, its record as last read, and what is to happen to it."""


class ReapScripts(ScriptRunner):
    """Redelivery, expiry and delays. `fence` comes from `acquire_scheduler`."""

    async def forfeit(
        self, group: str, reason: str = "", *, counts: bool = True
    ) -> int:
        """Ends the leases of a group that is known to be dead, and removes it.

        Args:
            group: The incarnation that ended.
            reason: Why, in words for people; see `losses`. The first one given for a
                run stays.
            counts: Whether the loss speaks against the jobs that ran there; False
                where a person stopped it. That of a draining group never does.

        Returns:
            How many jobs the next reap will take from it.
        """
        k = self._keys
        with translate():
            # A stranger's key of another type is no group that drains.
            pipe = self._redis.pipeline(transaction=False)
            pipe.hget(k.group(group), "state")
            (state,) = await pipe.execute(raise_on_error=False)
        await self.run("leave", [k.group(group), k.groups, k.work(group)], [group, "0"])
        with translate():
            members = await self._redis.zrange(k.lease, 0, -1)
        held = [text(member) for member in members]
        hints = await self.hints(held) if held else []
        mine = [j for j, hint in zip(held, hints, strict=True) if hint.owner == group]
        counted = "1" if counts and state != b"draining" else "0"
        ended = 0
        for chunk in chunks(mine):
            keys = [k.lease, k.bell, *(k.job(job_id) for job_id in chunk)]
            args = [group, one_line(reason), counted, *chunk]
            ended += number(await self.run("forfeit", keys, args))
        return ended

    async def reap(
        self,
        *,
        fence: int,
        limit: int,
        max_losses_alone: int = 1,
        dead_ms: int = DEAD_MS,
    ) -> ReapReport:
        """Acts on leases, deadlines and delays that have passed.

        Args:
            fence: The active scheduler's.
            limit: Most jobs of each kind to look at now.
            max_losses_alone: Leases lost while a job ran alone before it fails.
            dead_ms: How long the record, input and result of a dead letter stay.

        Returns:
            How many jobs went which way.
        """
        k = self._keys
        reply = await self.run_list(
            "overdue",
            [k.lease, k.deadline, k.delayed, k.groups],
            [limit, GROUP_SILENCE_MS],
        )
        parts = cast("list[list[bytes]]", reply[1:])
        await self._drop_undecodable([member for part in parts[:3] for member in part])
        leases, deadlines, due, silent = ([text(m) for m in part] for part in parts)
        overdue = list(dict.fromkeys([*deadlines, *leases, *due]))
        expired, unrenewed = set(deadlines), set(leases)
        shared: list[Argument] = [fence, max_losses_alone, MAX_START_LOSSES, dead_ms]
        tally = _Tally()
        for first in range(0, len(overdue), _REAP_CHUNK):
            chunk = overdue[first : first + _REAP_CHUNK]
            rows = [
                (
                    job_id,
                    hint,
                    _plan(job_id, hint, expired, unrenewed, max_losses_alone),
                )
                for job_id, hint in zip(chunk, await self.hints(chunk), strict=True)
            ]
            tally.add(rows, await self._reap_or_drop(shared, rows))
        for group in silent:
            keys = [k.group(group), k.groups, k.work(group)]
            tally.counts["groups"] += number(
                await self.run("leave", keys, [group, "1"])
            )
        return tally.report()

    async def _drop_undecodable(self, members: Sequence[bytes]) -> None:
        """Removes members that cannot be job ids: each reap would meet them again."""
        strange = [m for m in members if b"\xef\xbf\xbd" in text(m).encode()]
        if strange:
            await self._forget(strange)

    async def _forget(self, members: Sequence[bytes | str]) -> None:
        k = self._keys
        with translate():
            for zset in (k.lease, k.deadline, k.delayed):
                await self._redis.zrem(zset, *members)

    async def _reap_or_drop(
        self, shared: Sequence[Argument], rows: Sequence[_Row]
    ) -> list[str]:
        """Reaps; a job at which the script breaks is dropped, alone."""
        try:
            return await self._reap(shared, rows)
        except RedisUnsuitable as error:
            if not broke_on_data(error):
                raise
        if len(rows) > 1:
            actions: list[str] = []
            for row in rows:
                actions += await self._reap_or_drop(shared, [row])
            return actions
        await self._forget([rows[0][0]])
        return ["dropped"]

    async def _reap(
        self, shared: Sequence[Argument], rows: Sequence[_Row]
    ) -> list[str]:
        k = self._keys
        keys = [k.scheduler, k.lease, k.deadline, k.delayed, k.load, k.lanes]
        keys += (k.done, k.dead, k.bell, k.resume, k.usage)
        args: list[Argument] = [*shared, len(rows)]
        for job_id, hint, plan in rows:
            job_keys = self.job_keys(job_id, hint.tenant, hint.idem)
            keys += job_keys
            keys.append(k.group(hint.owner) if hint.owner else job_keys[0])
            keys.append(hint.entry_key or job_keys[0])
            args += (job_id, plan, hint.owner, hint.entry_key)
            args += _reaped(job_id, plan, hint)
        return [text(reply) for reply in await self.run_list("reap", keys, args)]


class _Tally:
    """What became of the jobs of one reap."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._dead: list[DeadJob] = []
        self._dropped: list[str] = []

    def add(self, rows: Sequence[_Row], actions: Sequence[str]) -> None:
        self.counts.update(actions)
        for (job_id, hint, _), action in zip(rows, actions, strict=True):
            if action == "dropped":
                self._dropped.append(job_id)
            elif action in ("dead", "unstartable"):
                self._dead.append(_dead(job_id, action, hint))

    def report(self) -> ReapReport:
        counts = self.counts
        return ReapReport(
            redelivered=counts["redeliver"],
            dead=len(self._dead),
            expired=counts["expire"],
            due=counts["due"],
            cancelled=counts["cancel"],
            groups=counts["groups"],
            dead_jobs=tuple(self._dead),
            dropped=tuple(self._dropped),
            fenced=counts["fenced"] > 0,
        )


def _plan(
    job_id: str, hint: Hint, deadlines: set[str], leases: set[str], most_alone: int
) -> str:
    """What `reap.lua` is expected to do; it checks by the same rules."""
    if not hint.state or hint.state in TERMINAL:
        return "forget"
    if job_id in deadlines:
        return "expire"
    if hint.state in ACTIVE and job_id in leases:
        if hint.cancel == "1":
            return "cancel"
        if hint.state == State.RUNNING:
            last = count_of(hint.alone_losses) + 1 >= most_alone
            convicts = hint.alone == "1" and last and is_counted(hint)
            return "dead" if convicts else "redeliver"
        unstarted = count_of(hint.start_losses) + 1
        return "unstartable" if unstarted >= MAX_START_LOSSES else "redeliver"
    if hint.state in (State.DELAYED, State.RETRYING):
        return "due"
    return "stray"


def _dead(job_id: str, action: str, hint: Hint) -> DeadJob:
    if action == "dead":
        return DeadJob(job_id, "lease_losses", count_of(hint.lease_losses) + 1)
    return DeadJob(job_id, "start_losses", count_of(hint.start_losses) + 1)


def _reaped(job_id: str, plan: str, hint: Hint) -> tuple[bytes, bytes, bytes]:
    """Result, end marker and error that `reap.lua` records; empty where none is."""
    if plan == "expire":
        return *ending(job_id, State.EXPIRED, EXPIRED, hint), b""
    if plan == "cancel":
        return *cancelled(job_id, hint), b""
    if plan == "redeliver":
        return b"", b"", encode(lost(hint))
    if plan in ("dead", "unstartable"):
        error = convicted(hint) if plan == "dead" else unstartable(hint)
        return *ending(job_id, State.FAILED, error, hint), encode(error)
    return b"", b"", b""
