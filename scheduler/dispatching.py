"""Plans, and sends the planned batches to their groups."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.errors import RedisUnsuitable
from ..shared.keys import Keys
from ..shared.metrics.catalog import BATCH_JOBS, BATCH_TOKENS, DISPATCHED
from ..shared.metrics.labels import know, model_label
from ..shared.script_runner import broke_on_data
from ..shared.scripts import DispatchItem, DispatchReply, Scripts
from .bell import Bell, heard
from .clock import ArrivalRate, RedisClock
from .groups import GroupReader
from .leader import LeadershipLost
from .learning import MadeRatio
from .parts import Memory, plan_parts
from .refusing import Refuser
from .snapshot import Batch, GroupView, Snapshot
from .targets import Aim
from .tokenizing import alone, internal
from .too_large import too_large
from .waiting import Ready, WaitingRoom

SWEEP_S: Final = 5.0
"""How often jobs in memory are compared with their records."""
SWEEP_JOBS: Final = 512
CREDIT_RETRY_S: Final = 0.01
"""A group promised less than was read; look again after this."""
_log = structlog.get_logger(__name__)


class Dispatcher:
    """Gives ready jobs to groups, as the policy says.

    Args:
        client: Redis.
        scripts: The shard's scripts.
        keys: Its names.
        fence: The active scheduler's number.
        name: Unique to this leadership; begins every batch's name.
        groups: The live groups.
        room: Ready jobs.
        refuser: Ends what can never run.
        clock: The clock of Redis.
        arrivals: Rate of new jobs.
        max_wait_ms: Longest wait for a fuller batch.
        weights: Tenant -> share of tokens; 1 where absent.
        short_tokens: Divides the length classes.
        made: Which part of the tokens asked for is made.
        tick_s: Longest time between two looks while jobs wait.
        lease_ms: How long a group has to start what it was given.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        scripts: Scripts,
        keys: Keys,
        fence: int,
        name: str,
        groups: GroupReader,
        room: WaitingRoom,
        refuser: Refuser,
        clock: RedisClock,
        arrivals: ArrivalRate,
        max_wait_ms: int,
        weights: Mapping[str, float],
        short_tokens: int,
        made: MadeRatio,
        tick_s: float,
        lease_ms: int,
    ) -> None:
        self._client = client
        self._scripts = scripts
        self._keys = keys
        self._fence = fence
        self._groups = groups
        self._room = room
        self._refuser = refuser
        self._clock = clock
        self._arrivals = arrivals
        self._max_wait_ms = max_wait_ms
        self._weights = weights
        self._short_tokens = short_tokens
        self._made = made
        self._tick_s = tick_s
        self._lease_ms = lease_ms
        self._batch_names = (f"{name}-{n}" for n in itertools.count(1))
        self._memory: Memory = {}
        self._aim = Aim()
        self._swept_at = 0.0
        self._swept = 0
        self.changed = Bell()

    async def run(self) -> None:
        """Plans whenever something changed, and at every tick while jobs wait."""
        while True:
            self.changed.clear()
            wait_s = await self.step()
            await heard(self.changed, wait_s)

    async def step(self) -> float | None:
        """Dispatches what can go now.

        Returns:
            Seconds after which to look again; None: not before something changes.
        """
        if not len(self._room):
            return None
        await self._sweep()
        groups = await self._groups.current()
        self._aim_anew(groups)
        now_ms = self._clock.now_ms()
        self._room.take_all(self._room.expired(now_ms))
        if not groups:
            return self._tick_s  # a plan would give nothing to anybody
        know((self._keys.model,))
        snapshot = Snapshot(
            jobs=self._room.candidates(),
            groups=tuple(groups),
            arrivals_per_s=self._arrivals.per_second(),
            max_wait_ms=self._max_wait_ms,
            weights=self._weights,
            short_tokens=self._short_tokens,
            made_ratio=dict(self._made.by_class),
        )
        shares = self._groups.route.shares
        made, self._memory = plan_parts(snapshot, shares, self._memory, now_ms)
        await self._refuse(made.impossible, groups)
        complete = await asyncio.gather(*(self._send(b) for b in made.batches))
        if not all(complete):
            return CREDIT_RETRY_S
        given = sum(len(batch.assignments) for batch in made.batches)
        if given and len(self._room) and given == len(snapshot.jobs):
            return 0.0  # more may fit than a plan looks at
        if made.wake_in_ms is not None:
            return min(made.wake_in_ms / 1000, self._tick_s)
        return self._tick_s if len(self._room) else None

    def _aim_anew(self, groups: Sequence[GroupView]) -> None:
        """Follows the route and the groups that come and go."""
        room, before = self._room, self._room.targets
        targets = self._aim.targets(groups, self._groups.route, room.begun_with)
        if targets is before:
            return
        room.aim_at(targets)
        if targets.away and groups and targets.away != before.away:
            _log.warning(
                "version_without_worker",
                shard=self._keys.shard,
                versions=targets.away,
                jobs_go_to=targets.spread or "nobody",
            )
        if targets.gone - before.gone:
            _log.warning(
                "weights_gone", shard=self._keys.shard, weights=sorted(targets.gone)
            )

    async def _send(self, batch: Batch) -> bool:
        """Dispatches one batch; whether the group had the credit that was read."""
        items: list[DispatchItem] = []
        sent: list[Ready] = []
        for assignment in batch.assignments:
            # Out of the room before the call: the job may come back through
            # `resume` before the reply is here.
            ready = self._room.take(assignment.job_id)
            if ready is None:
                continue
            sent.append(ready)
            items.append(
                DispatchItem(
                    job_id=assignment.job_id,
                    tokens=assignment.tokens,
                    token_ids=ready.token_ids,
                    cost_blocks=assignment.cost_blocks,
                    choices=assignment.choices,
                    alone=assignment.alone,
                    bucket=batch.bucket,
                    entry_key=ready.stream,
                    entry_id=ready.entry_id,
                )
            )
        name = next(self._batch_names)
        replies = await self._dispatched(batch.group, name, items)
        _log.debug(
            "batch",
            batch=name,
            group=batch.group,
            job_class=batch.job_class,
            bucket=batch.bucket,
            jobs=len(items),
            tokens=batch.tokens,
        )
        self._count(batch, replies)
        return self._settle(sent, replies)

    def _count(self, batch: Batch, replies: Sequence[DispatchReply]) -> None:
        given = [reply.job_id for reply in replies if reply.status == "dispatched"]
        if given:
            labels = (model_label(self._keys.model), batch.job_class)
            names = set(given)
            tokens = sum(a.tokens for a in batch.assignments if a.job_id in names)
            DISPATCHED.add(*labels, by=len(given))
            BATCH_JOBS.observe(len(given), *labels)
            BATCH_TOKENS.observe(tokens, *labels)

    async def _dispatched(
        self, group: str, name: str, items: Sequence[DispatchItem]
    ) -> list[DispatchReply]:
        """Dispatches all at once, and one by one when that fails as a whole."""
        try:
            return await self._scripts.dispatch(
                fence=self._fence,
                group=group,
                batch=name,
                lease_ms=self._lease_ms,
                items=items,
            )
        except RedisUnsuitable as error:
            if not broke_on_data(error):
                raise
            problem = error
        if len(items) > 1:
            return [
                reply
                for item in items
                for reply in await self._dispatched(group, name, [item])
            ]
        (item,) = items
        fault = internal("dispatching the job", problem)
        place = (item.entry_key or "", item.entry_id)
        await self._refuser.fail(item.job_id, fault, place)
        return [DispatchReply(item.job_id, "gone")]

    def _settle(self, sent: Sequence[Ready], replies: Sequence[DispatchReply]) -> bool:
        complete = True
        for ready, reply in zip(sent, replies, strict=True):
            if reply.status == "fenced":
                raise LeadershipLost
            if reply.status == "no_credit":
                self._room.add(ready)
                complete = False
            elif reply.status == "newer":
                # The payload may say less than the record, which is what groups read.
                schema = max(ready.job.schema, reply.epoch)
                job = msgspec.structs.replace(ready.job, schema=schema)
                self._room.add(msgspec.structs.replace(ready, job=job))
        return complete

    async def _refuse(
        self, job_ids: Sequence[str], groups: Sequence[GroupView]
    ) -> None:
        for job_id in job_ids:
            ready = self._room.take(job_id)
            if ready is not None:
                job = ready.job
                allowed = [group for group in groups if group.admits(job)] or groups
                error = alone(partial(too_large, job, allowed))
                await self._refuser.fail(job_id, error, (ready.stream, ready.entry_id))

    async def _sweep(self) -> None:
        """Forgets jobs that were cancelled or expired while they waited here."""
        now = asyncio.get_running_loop().time()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        before = self._clock.now_ms() - SWEEP_S * 1000
        old = [r.job.id for r in self._room if r.job.enqueued_ms < before]
        # Some at a time, each in its turn.
        if self._swept >= len(old):
            self._swept = 0
        some = old[self._swept : self._swept + SWEEP_JOBS]
        self._swept += SWEEP_JOBS
        if not some:
            return
        pipe = self._client.pipeline(transaction=False)
        for job_id in some:
            pipe.hget(self._keys.job(job_id), "state")
        states = await pipe.execute(raise_on_error=False)
        self._room.take_all(
            job_id
            for job_id, state in zip(some, states, strict=True)
            if state != b"queued"
        )
