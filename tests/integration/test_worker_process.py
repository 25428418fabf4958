"""The worker as a process: what it prints, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis.asyncio
from support.pools import MODEL, clean_environment
from support.servers import RedisServer, free_port
from support.tiny_models import save_tiny_model
from support.waiting import wait_until, wait_until_sync

from tokenmill.shared.keys import JobId, Keys, new_unique
from tokenmill.shared.messages import SCHEMA_VERSION, JobRequest, Sampling, encode
from tokenmill.shared.scripts import DispatchItem, NewJob, Scripts
from tokenmill.shared.tokens import ids_to_bytes

KEYS = Keys(MODEL, 0)


class WorkProcess:
    """`tokenmill work`, its output in a file."""

    def __init__(self, directory, url: str, *arguments: str, **env: str) -> None:
        self.output = directory / "work.out"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenmill", "work", "--url", url),
                    *("--name", MODEL, *arguments),
                ],
                env={**clean_environment(), "TOKENMILL_PROC_GROUP": "w-test", **env},
                cwd=directory,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_ready(self) -> None:
        wait_until_sync(lambda: "ready: " in self.text, what=self.text)


@pytest.fixture
def work(tmp_path) -> Iterator[object]:
    made: list[WorkProcess] = []

    def start(url: str, *arguments: str, **env: str) -> WorkProcess:
        made.append(WorkProcess(tmp_path, url, *arguments, **env))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


@pytest.fixture
async def client(newest_redis: RedisServer):
    client = redis.asyncio.Redis.from_url(newest_redis.url)
    await client.flushall()
    yield client
    await client.aclose()


async def give(client: redis.asyncio.Redis) -> str:
    """Dispatches one long job to the worker."""
    scripts = Scripts(client, KEYS)
    job_id = JobId(MODEL, 0, new_unique())
    request = JobRequest(
        text="abc", sampling=Sampling(max_tokens=10_000, ignore_eos=True)
    )
    job = NewJob(
        id=job_id,
        payload=encode(request),
        payload_hash="h",
        job_class="interactive",
        tenant="default",
        bucket="128",
        tokens=3,
        max_tokens=10_000,
        seed=1,
        keep_ms=60_000,
    )
    await scripts.enqueue([job])
    fence = await scripts.acquire_scheduler("test", 60_000)
    item = DispatchItem(
        job_id=str(job_id),
        tokens=3,
        token_ids=ids_to_bytes([97, 98, 99]),
        cost_blocks=1,
        bucket="128",
    )
    (reply,) = await scripts.dispatch(
        fence=fence, group="w-test", batch="b", lease_ms=10_000, items=[item]
    )
    assert reply.status == "dispatched"
    return str(job_id)


async def test_a_step_that_does_not_end_ends_the_process(
    work, client, newest_redis
) -> None:
    env = {"TOKENMILL_WORKER_STEP_TIMEOUT_S": "1"}
    one = work(newest_redis.url, "--engine", "echo:60000", **env)
    await asyncio.to_thread(one.wait_ready)
    job_id = await give(client)
    assert await asyncio.to_thread(one.process.wait, 60) == 75
    assert '"step_stuck"' in one.text
    # Its lease is over, and the reason stands beside it for the scheduler.
    seconds, microseconds = await client.time()
    until_ms = await client.zscore(KEYS.lease, job_id)
    assert until_ms <= seconds * 1000 + microseconds / 1000
    epoch, counts, cause = (await client.hget(KEYS.job(job_id), "lost")).split(b" ", 2)
    assert (epoch, counts) == (b"1", b"1")
    assert b"longer than worker.step_timeout_s=1 s" in cause
    assert not await client.exists(KEYS.group("w-test"))


async def test_a_second_signal_ends_at_once(work, client, newest_redis) -> None:
    one = work(newest_redis.url, "--engine", "echo:20")
    await asyncio.to_thread(one.wait_ready)
    job_id = await give(client)
    await wait_until(lambda: client.exists(KEYS.log(job_id)))
    os.kill(one.process.pid, signal.SIGTERM)
    await wait_until(lambda: '"draining"' in one.text)
    assert one.process.poll() is None
    os.kill(one.process.pid, signal.SIGTERM)
    assert await asyncio.to_thread(one.process.wait, 60) == 143
    lost = await client.hget(KEYS.job(job_id), "lost")
    assert lost.startswith(b"1 0 "), "no fault of the job"
    assert not await client.exists(KEYS.group("w-test"))


async def test_a_stuck_worker_ends_also_where_redis_does_not_answer(
    work, client, newest_redis
) -> None:
    env = {"TOKENMILL_WORKER_STEP_TIMEOUT_S": "1"}
    one = work(newest_redis.url, "--engine", "echo:60000", **env)
    await asyncio.to_thread(one.wait_ready)
    job = KEYS.job(await give(client))

    async def started() -> bool:
        return await client.hget(job, "state") == b"running"

    await wait_until(started)
    newest_redis.process.send_signal(signal.SIGSTOP)
    try:
        assert await asyncio.to_thread(one.process.wait, 60) == 75
    finally:
        newest_redis.process.send_signal(signal.SIGCONT)
    assert '"reason_not_recorded"' in one.text


async def test_a_worker_says_which_lengths_it_serves(
    work, client, newest_redis
) -> None:
    one = work(newest_redis.url, "--engine", "echo", "--serves", "short")
    await asyncio.to_thread(one.wait_ready)
    group = await client.hgetall(KEYS.group("w-test"))
    assert group[b"serves"] == b"short"
    assert int(group[b"schema"]) == SCHEMA_VERSION
    wrong = work(newest_redis.url, "--engine", "echo", "--serves", "middling")
    assert await asyncio.to_thread(wrong.process.wait, 60) == 2
    assert "serves" in wrong.text


async def test_a_signal_while_idle_is_a_clean_end(work, client, newest_redis) -> None:
    one = work(newest_redis.url, "--engine", "echo")
    await asyncio.to_thread(one.wait_ready)
    assert await client.exists(KEYS.group("w-test"))
    os.kill(one.process.pid, signal.SIGINT)
    assert await asyncio.to_thread(one.process.wait, 60) == 0
    assert not await client.exists(KEYS.group("w-test"))


def test_exit_codes_tell_the_cause(work, newest_redis) -> None:
    assert work(newest_redis.url, "--engine", "tape").process.wait(60) == 2
    assert work(newest_redis.url, "--model", "no/such").process.wait(60) == 14
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    silent = work(nowhere, "--engine", "echo")
    assert silent.process.wait(60) == 3
    assert "error: " in silent.text


def test_a_damaged_model_ends_the_start_with_one_line(
    work, newest_redis, tmp_path
) -> None:
    model = save_tiny_model("llama", tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    one = work(newest_redis.url, "--model", str(model))
    assert one.process.wait(60) == 14
    (error,) = [line for line in one.text.splitlines() if line.startswith("error: ")]
    assert str(weights) in error
    assert "in tensor model.layers.1." in error
    assert "Traceback" not in one.text
