"""Commands that are told to stop: early, while they wait, and while they print."""

import signal

import pytest
from support.commands import CommandPool
from support.fake_group import FakeGroup
from support.waiting import wait_until

from tokenmill.shared.redis import connect

BOTH = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
async def pool(newest_redis):
    connection = connect(newest_redis.url)
    await connection.flushall()
    async with FakeGroup(connection, delay_s=0.02) as group:
        yield CommandPool(newest_redis.url, group)
    await connection.aclose()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("number", "code"), BOTH)
async def test_a_signal_cancels_unless_told_to_keep(pool, number, code, keep) -> None:
    options = ["--max-tokens", "2000", *(["--keep"] if keep else [])]
    process = await pool.start("submit", "--stream", *options, "a " * 2000)
    assert process.stdout is not None
    await process.stdout.readexactly(6)  # tokens are flushed one by one
    process.send_signal(number)
    _, err = await process.communicate()
    assert process.returncode == code
    job = await pool.newest()
    assert job in err.decode()
    if keep:
        assert await pool.state(job) == "running"
        assert "goes on" in err.decode()
    else:

        async def cancelled():
            return await pool.state(job) == "cancelled"

        await wait_until(cancelled, what="the cancellation")


@pytest.mark.parametrize(("number", "code"), BOTH)
async def test_a_job_that_waits_is_cancelled_too(pool, number, code) -> None:
    await pool.group.pause()
    process = await pool.start("submit", "x")
    job = await wait_until(pool.newest, what="the job")
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, out) == (code, b"")
    assert f"job {job}: cancelled" in err.decode()
    assert await pool.state(job) == "cancelled"


async def test_leaving_a_tail_leaves_the_job_alone(pool) -> None:
    await pool.group.pause()
    job = (await pool.run("submit", "x", "--no-wait"))[1].strip()
    process = await pool.start("tail", job)
    channel = pool.group.keys.wake(job)

    async def followed():
        return (await pool.group.redis.pubsub_numsub(channel))[0][1]

    await wait_until(followed, what="the subscription")
    process.send_signal(signal.SIGTERM)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == 143
    assert await pool.state(job) == "queued"


@pytest.mark.parametrize(
    "module",
    [
        *("tokenmill.shared.errors", "msgspec", "typer", "tokenmill.producer.cli"),
        *("tokenmill.workers.cli", "redis", "tokenmill.producer.client"),
    ],
)
async def test_an_interrupt_during_the_start_is_silent(
    pool, monkeypatch, module
) -> None:
    await pool.group.pause()
    job = (await pool.run("submit", "x", "--no-wait"))[1].strip()
    # The interpreter then tells, on standard error, of each import as it ends.
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    process = await pool.start("tail", job)
    assert process.stderr is not None
    async for line in process.stderr:
        if line.decode().split("|")[-1].strip() == module:
            break
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    said = [s for s in err.decode().splitlines() if not s.startswith("import time:")]
    assert (process.returncode, out, said) == (130, b"", [])
