"""The blocking client: the same surface, from many threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fake_group import FakeGroup

from tokenmill import Prompt, SyncClient
from tokenmill.producer.sync import LoopThread
from tokenmill.shared.errors import (
    InvalidRequest,
    JobCancelled,
    QueueFull,
    RedisUnavailable,
    ResultTimeout,
    TokenmillError,
    UnknownJob,
)
from tokenmill.shared.redis import connect
from tokenmill.shared.scripts import Limits


@pytest.fixture
def group(newest_redis):
    """A group on a loop of its own, as these tests block theirs."""
    thread = LoopThread()
    connection = connect(newest_redis.url)

    async def begin():
        await connection.flushall()
        fake = FakeGroup(connection, delay_s=0.001)
        return await fake.__aenter__()

    async def finish(fake):
        await fake.__aexit__(None, None, None)
        await connection.aclose()

    fake = thread.run(begin())
    fake.pause_now = lambda: thread.run(fake.pause())
    fake.write_limits_now = lambda new: thread.run(fake.scripts.write_limits(new))
    yield fake
    thread.run(finish(fake))
    thread.stop()


@pytest.fixture
def mill(newest_redis, group):
    with SyncClient(newest_redis.url) as client:
        yield client


def test_submit_await_stream_and_look(mill, group) -> None:
    job = mill.submit("hello wide world")
    assert job.result(timeout=60).text == "hello wide world"
    assert job.done()
    tokens = job.stream(from_offset=1)
    assert "".join(delta.text for delta in tokens) == " wide world"
    assert tokens.end.state == "succeeded"
    assert job.info().state == "succeeded"
    assert [info.id for info in mill.jobs()] == [job.id]
    assert mill.job(job.id).result(0.5).text == "hello wide world"
    assert mill.models()[0].num_groups == 1


def test_many_jobs_as_they_complete(mill, group) -> None:
    jobs = mill.submit_many(f"number {i}" for i in range(50))
    texts = {job.result().text for job in mill.as_completed([*jobs, jobs[0].id])}
    assert texts == {f"number {i}" for i in range(50)}
    for first in mill.as_completed(jobs):
        assert first in jobs
        break
    assert not mill._client._session.listener._watchers


def test_errors_are_the_same(mill, group) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        mill.submit(Prompt("x", priority=1000))
    with pytest.raises(UnknownJob):
        mill.job("nonsense")
    group.delay_s = 0.05
    job = mill.submit("a " * 100)
    with pytest.raises(ResultTimeout):
        job.result(timeout=0.05)
    assert job.cancel() in ("cancelling", "cancelled")
    with pytest.raises(JobCancelled):
        job.result(60)


def test_leaving_a_stream_can_cancel(mill, group) -> None:
    group.delay_s = 0.02
    job = mill.submit("a " * 100)
    with job.stream(cancel_on_leave=True) as tokens:
        assert next(tokens).text
    with pytest.raises(JobCancelled):
        job.result(60)


def test_threads_share_one_client(mill, group) -> None:
    def work(index: int) -> str:
        job = mill.submit(f"thread {index}")
        return "".join(delta.text for delta in job.stream())

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(64))) == [f"thread {i}" for i in range(64)]


def test_close_ends_calls_in_other_threads(newest_redis, group) -> None:
    client = SyncClient(newest_redis.url)
    client.open()
    group.pause_now()
    job = client.submit("hello")
    caught = []

    def wait() -> None:
        try:
            job.result()
        except TokenmillError as error:
            caught.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not client._client._session.listener._watchers:
        pass
    client.close()
    waiting.join(60)
    assert caught == ["the client was closed during the call"]
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("tokenmill-client") == 1  # the group's own
    for call in (job.result, client.models, lambda: client.submit("x")):
        with pytest.raises(TokenmillError, match=r"closed|not open"):
            call()
    client.close()


def test_a_wrong_address_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(RedisUnavailable):
        SyncClient("redis://127.0.0.1:1/0").open()
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_to_open_its_own(mill, group) -> None:
    child = os.fork()
    if child == 0:
        try:
            mill.models()
        except TokenmillError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_full_queue_is_an_error_or_waited_out(mill, group) -> None:
    group.pause_now()
    group.write_limits_now(Limits(max_waiting_jobs=1))
    first = mill.submit("first")
    for options in ({}, {"when_full": "wait", "wait_s": 0.1}):
        with pytest.raises(QueueFull) as caught:
            mill.submit("second", **options)
        assert caught.value.limit == "max_waiting_jobs"
    with pytest.raises(QueueFull) as caught:
        mill.submit_many(["second", "third"], wait_s=0.1)
    assert list(caught.value.refused) == [0, 1]
    assert first.cancel() == "cancelled"
    assert mill.submit("second", when_full="wait", wait_s=60).id


def test_the_pool_is_seen_as_by_the_other_client(mill):
    seen = mill.snapshot()
    assert [one.model for one in seen.groups] == [mill.models()[0].name]
    assert mill.model_card(seen.groups[0].model) is not None
    assert mill.history(1) == []
