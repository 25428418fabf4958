"""A job that lost its worker keeps its place: before everything that came later."""

import pytest
from support.shard_client import KEYS, Shard, new_job

from tokenmill.scheduler.entries import Stream, parse_entry
from tokenmill.scheduler.fairness import FairQueue
from tokenmill.scheduler.snapshot import Fairness, WaitingJob
from tokenmill.shared.messages import JobClass


@pytest.fixture
async def shard(redis_client) -> Shard:
    return await Shard(redis_client).open("g1")


async def only_entry(shard: Shard, stream: Stream):
    ((entry_id, fields),) = await shard.client.xrange(stream.key)
    seconds, microseconds = await shard.client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    return parse_entry(KEYS, stream, entry_id, fields, now_ms)


async def age(shard: Shard, job_id: str, by_ms: int) -> int:
    """Makes a job older; returns its time of enqueue."""
    before = int(await shard.client.hget(KEYS.job(job_id), "enqueued_ms")) - by_ms
    await shard.client.hset(KEYS.job(job_id), "enqueued_ms", before)
    return before


async def test_a_redelivered_job_waits_since_its_enqueue(shard) -> None:
    job_id, _ = await shard.run()
    enqueued_ms = await age(shard, job_id, 30_000)
    await shard.overdue(KEYS.lease, job_id)
    await shard.reap()
    entry = await only_entry(shard, Stream(KEYS.resume, None))
    assert entry.job_id == job_id
    assert entry.enqueued_ms == enqueued_ms


async def test_a_delayed_job_waits_since_it_was_due(shard) -> None:
    job = new_job(delay_ms=60_000)
    (reply,) = await shard.scripts.enqueue([job])
    job_id = reply.job_id
    enqueued_ms = await age(shard, job_id, 30_000)
    await shard.overdue(KEYS.delayed, job_id)
    await shard.reap()
    entry = await only_entry(shard, Stream(KEYS.resume, None))
    assert entry.enqueued_ms >= enqueued_ms + 30_000


def test_of_one_tenant_the_one_that_came_first_goes_first() -> None:
    jobs = [
        WaitingJob(
            id=f"job-{enqueued_ms}",
            job_class=JobClass.INTERACTIVE,
            bucket="128",
            tokens=10,
            max_tokens=10,
            tenant="t",
            enqueued_ms=enqueued_ms,
        )
        for enqueued_ms in (5_000, 1_000, 9_000)
    ]
    queue = FairQueue(jobs, Fairness(), {}, 10_000)
    first = queue.pop()
    assert first is not None
    assert first.enqueued_ms == 1_000


@pytest.mark.parametrize("tokens", [0, 3])
async def test_an_entry_says_whether_the_client_has_had_tokens(shard, tokens) -> None:
    job_id, epoch = await shard.run()
    if tokens:
        await shard.emit(job_id, epoch, 1, 0)
    await shard.overdue(KEYS.lease, job_id)
    await shard.reap()
    entry = await only_entry(shard, Stream(KEYS.resume, None))
    assert entry.started is bool(tokens)
