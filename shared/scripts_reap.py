"""Scripts of the janitor: what time has overtaken, and groups that are dead."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, cast

from .lifecycle import ACTIVE, TERMINAL, State
from .redis import translate
from .script_runner import (
    CANCELLED,
    Argument,
    Hint,
    ScriptRunner,
    chunks,
    ending,
    number,
    text,
)
from .script_types import ReapReport

GROUP_SILENCE_MS: Final = 60_000
"""After this long without a heartbeat a group is looked at, and forgotten when its
hash has expired."""
_REAP_CHUNK: Final = 64
"""Fewer than elsewhere: each job brings nine keys and may write twenty times."""


class ReapScripts(ScriptRunner):
    """Redelivery, expiry and delays. `fence` comes from `acquire_scheduler`."""

    async def forfeit(self, group: str) -> int:
        """Ends the leases of a group that is known to be dead, and removes it.

        Returns:
            How many jobs the next reap will take from it.
        """
        k = self._keys
        await self.run("leave", [k.group(group), k.groups, k.work(group)], [group, "0"])
        with translate():
            members = await self._redis.zrange(k.lease, 0, -1)
        held = [text(member) for member in members]
        hints = await self.hints(held) if held else []
        mine = [j for j, hint in zip(held, hints, strict=True) if hint.owner == group]
        ended = 0
        for chunk in chunks(mine):
            keys = [k.lease, k.bell, *(k.job(job_id) for job_id in chunk)]
            ended += number(await self.run("forfeit", keys, [group, *chunk]))
        return ended

    async def reap(
        self, *, fence: int, limit: int, max_lease_losses: int
    ) -> ReapReport:
        """Acts on leases, deadlines and delays that have passed.

        Args:
            fence: The active scheduler's.
            limit: Most jobs of each kind to look at now.
            max_lease_losses: Lost leases (of jobs that had started) before a job fails.

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
        counts: Counter[str] = Counter()
        for first in range(0, len(overdue), _REAP_CHUNK):
            chunk = overdue[first : first + _REAP_CHUNK]
            hints = await self.hints(chunk)
            plans = [
                _plan(job_id, hint, set(deadlines), set(leases), max_lease_losses)
                for job_id, hint in zip(chunk, hints, strict=True)
            ]
            shared: list[Argument] = [fence, max_lease_losses]
            counts.update(await self._reap(shared, chunk, hints, plans))
        for group in silent:
            keys = [k.group(group), k.groups, k.work(group)]
            counts["groups"] += number(await self.run("leave", keys, [group, "1"]))
        return ReapReport(
            redelivered=counts["redeliver"],
            dead=counts["dead"],
            expired=counts["expire"],
            due=counts["due"],
            cancelled=counts["cancel"],
            groups=counts["groups"],
            fenced=counts["fenced"] > 0,
        )

    async def _drop_undecodable(self, members: Sequence[bytes]) -> None:
        """Removes members that cannot be job ids: each reap would meet them again."""
        strange = [m for m in members if b"\xef\xbf\xbd" in text(m).encode()]
        if strange:
            k = self._keys
            with translate():
                for zset in (k.lease, k.deadline, k.delayed):
                    await self._redis.zrem(zset, *strange)

    async def _reap(
        self,
        shared: Sequence[Argument],
        job_ids: Sequence[str],
        hints: Sequence[Hint],
        plans: Sequence[str],
    ) -> list[str]:
        k = self._keys
        keys = [k.scheduler, k.lease, k.deadline, k.delayed, k.load, k.lanes]
        keys += (k.done, k.dead, k.bell, k.resume)
        args: list[Argument] = [*shared, len(job_ids)]
        for job_id, hint, plan in zip(job_ids, hints, plans, strict=True):
            job_keys = self.job_keys(job_id, hint.tenant, hint.idem)
            keys += job_keys
            keys.append(k.group(hint.owner) if hint.owner else job_keys[0])
            keys.append(hint.entry_key or job_keys[0])
            args += (job_id, plan, hint.owner, hint.entry_key)
            args += _reaped(job_id, plan, hint)
        return [text(reply) for reply in await self.run_list("reap", keys, args)]


def _plan(
    job_id: str, hint: Hint, deadlines: set[str], leases: set[str], most_losses: int
) -> str:
    """What `reap.lua` is expected to do; it checks by the same rules."""
    if not hint.state or hint.state in TERMINAL:
        return "forget"
    if job_id in deadlines:
        return "expire"
    if hint.state in ACTIVE and job_id in leases:
        if hint.cancel == "1":
            return "cancel"
        lost = number(hint.lease_losses) + 1
        dead = hint.state == State.RUNNING and lost >= most_losses
        return "dead" if dead else "redeliver"
    if hint.state in (State.DELAYED, State.RETRYING):
        return "due"
    return "stray"


def _reaped(job_id: str, plan: str, hint: Hint) -> tuple[bytes, bytes]:
    if plan == "expire":
        message = f"the deadline passed while the job was {hint.state}"
        return ending(job_id, "expired", "job_expired", message, hint)
    if plan == "cancel":
        return ending(job_id, *CANCELLED, hint)
    if plan == "dead":
        losses = number(hint.lease_losses) + 1
        message = (
            f"the worker was lost {losses} times while it ran this job; "
            "it is kept among the dead letters"
        )
        return ending(job_id, "failed", "lease_lost", message, hint)
    return b"", b""
