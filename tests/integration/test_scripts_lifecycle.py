"""The scripts against the table in `lifecycle.py`: these pairs happen, no others."""

import pytest
from support.shard_client import HOUR_MS, KEYS, Shard, ending_of

from tokenmill.shared.lifecycle import TERMINAL, TRANSITIONS, Event, State


class Life:
    """One job that is brought into a state and then meets an event."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.job_id = ""
        self.epoch = 0

    async def reach(self, state: State) -> None:
        delay = HOUR_MS if state is State.DELAYED else 0
        self.job_id = await self.shard.enqueue(delay_ms=delay, deadline_ms=2 * HOUR_MS)
        if state in (State.DELAYED, State.QUEUED):
            return
        await self.event(Event.DISPATCH)
        if state is State.DISPATCHED:
            return
        await self.event(Event.START)
        await self.event(
            {
                State.RETRYING: Event.FAULT,
                State.SUCCEEDED: Event.FINISH,
                State.FAILED: Event.REJECT,
                State.CANCELLED: Event.CANCEL,
                State.EXPIRED: Event.EXPIRE,
            }.get(state)
        )

    async def event(self, event: Event | None) -> None:
        if event is not None:
            await getattr(self, event.value)()

    async def due(self) -> None:
        await self.shard.overdue(KEYS.delayed, self.job_id)
        await self.shard.reap()

    async def dispatch(self) -> None:
        record = await self.shard.scripts.job(self.job_id)
        reply = await self.shard.dispatch(
            self.job_id, entry_key=record.get("entry_key")
        )
        self.epoch = reply.epoch or self.epoch

    async def start(self) -> None:
        await self.shard.start(self.job_id, self.epoch)

    async def finish(self) -> None:
        await self.shard.finish(self.job_id, self.epoch)

    async def fault(self) -> None:
        await self.shard.fail(self.job_id, self.epoch)

    async def reject(self) -> None:
        result, end = ending_of(self.job_id, "failed")
        await self.shard.scripts.reject(
            fence=self.shard.fence,
            job_id=self.job_id,
            state="failed",
            result=result,
            end=end,
        )
        await self.shard.finish(self.job_id, self.epoch, state="failed")

    async def lease_lost(self) -> None:
        await self.shard.overdue(KEYS.lease, self.job_id)
        await self.shard.reap()

    async def release(self) -> None:
        await self.shard.scripts.release(group="g1", jobs=[(self.job_id, self.epoch)])

    async def cancel(self) -> None:
        if await self.shard.scripts.cancel(self.job_id) == "cancelling":
            await self.shard.finish(self.job_id, self.epoch, state="cancelled")

    async def expire(self) -> None:
        await self.shard.overdue(KEYS.deadline, self.job_id)
        await self.shard.reap()


@pytest.fixture
async def life(redis_client):
    return Life(await Shard(redis_client).open("g1"))


@pytest.mark.parametrize(("state", "event"), TRANSITIONS)
async def test_every_pair_of_the_table_happens_in_redis(life, state, event):
    await life.reach(state)
    assert await life.shard.state(life.job_id) == state
    await life.event(event)
    assert await life.shard.state(life.job_id) == TRANSITIONS[state, event]


@pytest.mark.parametrize("state", list(State))
async def test_no_event_moves_a_job_where_the_table_does_not_allow_it(life, state):
    await life.reach(state)
    for event in Event:
        if (state, event) not in TRANSITIONS:
            await life.event(event)
            assert await life.shard.state(life.job_id) == state, event


@pytest.mark.parametrize("state", sorted(TERMINAL))
async def test_a_terminal_record_is_not_touched_by_anything(life, state):
    await life.reach(state)
    record = await life.shard.scripts.job(life.job_id)
    result, log = (
        await life.shard.result(life.job_id),
        await life.shard.log(life.job_id),
    )
    for event in Event:
        await life.event(event)
    assert await life.shard.scripts.job(life.job_id) == record
    assert await life.shard.result(life.job_id) == result
    assert await life.shard.log(life.job_id) == log
