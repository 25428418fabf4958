"""Deltas on their way to Redis: joined, in order, repeated unchanged after an error."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import redis.exceptions
from support.waiting import wait_until

from tokenmill.shared.clock import RedisClock
from tokenmill.shared.config import SchedulerConfig
from tokenmill.shared.messages import Delta, FinishReason, JobRequest, JobResult
from tokenmill.shared.outage import Outage
from tokenmill.shared.scripts import EmitItem, FinishItem, Started
from tokenmill.workers.ending import Ending, Way
from tokenmill.workers.engine.request import EngineRequest, TokenDelta
from tokenmill.workers.finish import Recorder
from tokenmill.workers.jobs import JobTable, RunningJob
from tokenmill.workers.publish import Publisher


class FakeScripts:
    """Answers as Redis would; errors can be laid in its way."""

    def __init__(self) -> None:
        self.emits: list[list[EmitItem]] = []
        self.finishes: list[list[FinishItem]] = []
        self.errors: list[Exception] = []
        self.status = "written"
        self.poison: str | None = None
        self.together = 0

    def deltas(self) -> list[Delta]:
        return [
            msgspec.json.decode(item.delta, type=Delta)
            for call in self.emits
            for item in call
        ]

    async def emit(self, *, group: str, items: list[EmitItem]) -> list[str]:
        if any(item.job_id == self.poison for item in items):
            raise redis.exceptions.ResponseError("wrong kind of value")
        self.emits.append(list(items))
        if self.errors:
            raise self.errors.pop(0)
        return [self.status] * len(items)

    async def finish(self, *, group: str, items: list[FinishItem]) -> list[str]:
        self.finishes.append(list(items))
        if self.errors:
            raise self.errors.pop(0)
        return ["recorded"] * len(items)

    async def emit_and_finish(
        self, *, group: str, deltas: list[EmitItem], ends: list[FinishItem]
    ) -> tuple[list[str], list[str]]:
        """One round trip: an error means that neither was answered."""
        self.together += 1
        emitted = await self.emit(group=group, items=deltas)
        return emitted, await self.finish(group=group, items=ends)


class Desk:
    """A publisher with all that it needs."""

    def __init__(self, emit_s: float) -> None:
        self.scripts = FakeScripts()
        self.table = JobTable()
        self.lost: list[str] = []
        self.cancelled: list[str] = []
        clock = RedisClock()
        recorder = Recorder(
            scripts=self.scripts,
            group="g",
            model="m",
            weights_version="w",
            table=self.table,
            clock=clock,
            buckets=(128,),
            limits=SchedulerConfig(),
        )
        self.publisher = Publisher(
            scripts=self.scripts,
            group="g",
            table=self.table,
            recorder=recorder,
            clock=clock,
            outage=Outage(),
            emit_s=emit_s,
            on_lost=self._lose,
            on_cancelled=lambda job: self.cancelled.append(job.id),
            on_sent=lambda: None,
        )
        self.task = asyncio.create_task(self.publisher.run())

    def _lose(self, job: RunningJob) -> None:
        self.lost.append(job.id)
        self.table.remove(job)

    def job(self, name: str = "j") -> RunningJob:
        started = Started(
            status="started", job_id=name, epoch=1, enqueued_ms=1, started_ms=2
        )
        request = EngineRequest(
            id=f"{name}@1", token_ids=(1,), sampling=JobRequest().sampling, seed=0
        )
        job = RunningJob(started, JobRequest(), request)
        self.table.add(job)
        return job

    def add(self, job: RunningJob, offset: int, text: str, *, last: bool = False):
        self.publisher.add(
            job,
            TokenDelta(
                request_id=job.engine_id,
                choice=0,
                offset=offset,
                token_ids=tuple(text.encode()),
                text=text,
                finish_reason=FinishReason.STOP if last else None,
            ),
        )

    async def settled(self) -> None:
        await asyncio.wait_for(self.publisher.settled(), 30)  # half of emit_s


@pytest.fixture
async def desks() -> AsyncIterator[object]:
    made: list[Desk] = []

    def make(emit_s: float = 60.0) -> Desk:
        made.append(Desk(emit_s))
        return made[-1]

    yield make
    for desk in made:
        desk.task.cancel()


async def test_the_first_and_the_last_leave_at_once_the_rest_is_joined(desks) -> None:
    desk = desks(emit_s=60.0)
    job = desk.job()
    desk.add(job, 0, "a")
    await wait_until(lambda: desk.scripts.emits)
    for offset, letter in enumerate("bcd", start=1):
        desk.add(job, offset, letter)
    desk.add(job, 4, "e", last=True)
    await desk.settled()
    first, rest = desk.scripts.deltas()
    assert (first.offset, first.text) == (0, "a")
    assert (rest.offset, rest.text) == (1, "bcde")
    assert rest.token_ids == tuple(b"bcde")
    assert rest.finish_reason is FinishReason.STOP
    seqs = [item.seq for call in desk.scripts.emits for item in call]
    assert seqs == [1, 2]


async def test_what_is_held_leaves_when_its_time_is_over(desks) -> None:
    desk = desks(emit_s=0.02)
    job = desk.job()
    desk.add(job, 0, "a")
    desk.add(job, 1, "b")
    await desk.settled()
    assert "".join(delta.text for delta in desk.scripts.deltas()) == "ab"


async def test_a_repeated_call_is_the_same_to_the_byte(desks) -> None:
    desk = desks(emit_s=0.0)
    desk.scripts.errors = [redis.exceptions.ConnectionError("gone")] * 2
    job = desk.job()
    desk.add(job, 0, "a", last=True)
    await desk.settled()
    assert len(desk.scripts.emits) == 3
    assert desk.scripts.emits[0] == desk.scripts.emits[1] == desk.scripts.emits[2]


async def test_the_end_waits_for_the_deltas_and_is_repeated_unchanged(desks) -> None:
    desk = desks()
    job = desk.job()
    desk.add(job, 0, "a")
    desk.add(job, 1, "b")
    desk.scripts.errors = [OSError("gone"), OSError("gone")]
    desk.publisher.end(Ending(job, Way.CANCELLED))
    await desk.settled()
    desk2 = desk.scripts
    assert "".join(delta.text for delta in desk2.deltas()[-2:]) == "ab"
    (item,) = desk2.finishes[-1]
    assert item.seq == 3
    result = msgspec.json.decode(item.result, type=JobResult)
    assert result.text == "ab"
    assert result.choices[0].finish_reason is FinishReason.CANCELLED
    assert len(desk.table) == 0
    desk2.errors = [OSError("gone")]
    other = desk.job("other")
    desk.publisher.end(Ending(other, Way.SUCCEEDED))
    await desk.settled()
    assert desk2.finishes[-1] == desk2.finishes[-2]


async def test_a_lost_job_is_reported_and_sends_nothing_more(desks) -> None:
    desk = desks(emit_s=0.0)
    desk.scripts.status = "lost"
    job = desk.job()
    desk.add(job, 0, "a")
    await wait_until(lambda: desk.lost)
    desk.publisher.end(Ending(job, Way.SUCCEEDED))
    await desk.settled()
    assert desk.scripts.finishes == []
    assert desk.publisher.buffered_tokens == 0


async def test_a_cancelled_job_is_reported_once_its_delta_is_written(desks) -> None:
    desk = desks()
    desk.scripts.status = "cancelled"
    desk.add(desk.job(), 0, "a")
    await wait_until(lambda: desk.cancelled)
    assert desk.lost == []


async def test_what_redis_refuses_for_good_costs_its_job_alone(desks) -> None:
    desk = desks()
    desk.scripts.poison = "bad"
    good, bad = desk.job("good"), desk.job("bad")
    desk.add(good, 0, "a")
    desk.add(bad, 0, "b")
    await desk.settled()
    assert desk.lost == ["bad"]
    assert [delta.text for delta in desk.scripts.deltas()] == ["a"]


async def test_choices_are_kept_apart(desks) -> None:
    desk = desks(emit_s=0.0)
    job = desk.job()
    for choice in (0, 1):
        desk.publisher.add(
            job,
            TokenDelta(
                request_id="", choice=choice, offset=0, token_ids=(65,), text="A"
            ),
        )
    await desk.settled()
    assert sorted(delta.choice for delta in desk.scripts.deltas()) == [0, 1]


async def test_the_last_delta_and_the_end_take_one_round_trip(desks) -> None:
    desk = desks()
    job = desk.job()
    desk.scripts.errors = [OSError("gone")]
    desk.add(job, 0, "a", last=True)
    desk.publisher.end(Ending(job, Way.SUCCEEDED))
    await desk.settled()
    assert desk.scripts.together == 2  # the lost reply, and the same again
    assert desk.scripts.emits[0] == desk.scripts.emits[1]
    ((item,),) = desk.scripts.finishes
    assert item.seq == 2
    assert msgspec.json.decode(item.result, type=JobResult).timings.ttft_ms is not None
    assert len(desk.table) == 0
    assert desk.lost == []


async def test_an_end_that_redis_answered_outweighs_its_repeated_delta(desks) -> None:
    desk = desks()
    job = desk.job()
    desk.scripts.status = "lost"  # the first call was carried out, its reply was not
    desk.add(job, 0, "a", last=True)
    desk.publisher.end(Ending(job, Way.SUCCEEDED))
    await desk.settled()
    assert desk.lost == []
    assert len(desk.table) == 0


async def test_a_job_that_goes_on_is_not_ended_with_its_neighbour(desks) -> None:
    desk = desks()
    job = desk.job()
    desk.add(job, 0, "a")
    other = desk.job("other")
    desk.add(other, 0, "b")
    desk.publisher.end(Ending(other, Way.CANCELLED))
    await desk.settled()
    assert [item.job_id for call in desk.scripts.finishes for item in call] == ["other"]
    assert desk.table.holds(job)
