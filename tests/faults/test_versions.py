"""Parts of neighbouring schema versions in one pool: each runs what it can read.

Real processes: `support/other_schema.py` is a release of another version.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.pools import MODEL, clean_environment
from support.servers import RedisServer, running
from support.waiting import ticks, wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.config import Config
from tokenmill.shared.keys import MODELS, POOL, JobId, Keys, new_unique
from tokenmill.shared.messages import (
    INPUT_REF_VERSION,
    SCHEMA_VERSION,
    JobRequest,
    encode,
)
from tokenmill.shared.pool.shard_checks import examine_shard
from tokenmill.shared.redis import Finding, connect
from tokenmill.shared.script_types import DispatchItem, NewJob
from tokenmill.shared.scripts import Scripts

OTHER = Path(__file__).parents[1] / "support" / "other_schema.py"
KEYS = Keys(MODEL, 0)
OLD, NEXT = INPUT_REF_VERSION - 1, SCHEMA_VERSION + 1
OFFLOAD = 2048
SHORT = "short "
LONG = "long " * 600
"""By reference: a request of version 2."""


class Release:
    """One pool, its parts started and stopped one by one."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.parts: list[subprocess.Popen[bytes]] = []
        self.env = {
            **clean_environment(),
            "TOKENMILL_URL": url,
            "TOKENMILL_LOG_FORMAT": "json",
            "TOKENMILL_MODELS": MODEL,
            "TOKENMILL_STORAGE_URL": f"file://{directory}/store",
            "TOKENMILL_STORAGE_OFFLOAD_BYTES": str(OFFLOAD),
            "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "600",
            "TOKENMILL_WORKER_LEASE_MS": "3000",
            "TOKENMILL_WORKER_DRAIN_S": "0.5",
        }

    def start(self, version: int, *words: str) -> subprocess.Popen[bytes]:
        log = self.directory / f"{words[0]}-{version}-{len(self.parts)}.log"
        with log.open("wb") as out:
            part = subprocess.Popen(
                [sys.executable, str(OTHER), str(version), *words],
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
            )
        self.parts.append(part)
        return part

    def scheduler(self, version: int) -> subprocess.Popen[bytes]:
        return self.start(version, "schedule")

    def worker(self, version: int) -> subprocess.Popen[bytes]:
        return self.start(version, "work", "--name", MODEL, "--engine", "echo:1")

    def submit(self, version: int, text: str) -> str:
        """One job, enqueued by a producer of this version; its id."""
        done = subprocess.run(
            [
                *(sys.executable, str(OTHER), str(version), "submit", text),
                *("--model", MODEL, "--no-wait", "--max-tokens", "3"),
            ],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def stop(self, part: subprocess.Popen[bytes]) -> None:
        part.send_signal(signal.SIGTERM)
        assert part.wait(60) == 0, self.logs()

    def logs(self) -> str:
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text()}" for f in files)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running("6.2") as made:
        yield made


@pytest.fixture
def pool(server, tmp_path, request) -> Iterator[Release]:
    with redis.Redis(port=server.port) as client:
        client.flushall()
    made = Release(tmp_path, server.url)
    try:
        yield made
    finally:
        for part in made.parts:
            part.kill()
            part.wait()
        sys.stdout.write(made.logs())


@pytest.fixture
def admin(server) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        yield client


async def lives(admin: redis.Redis, *, schema: int) -> None:
    """A scheduler has published the pool, and a worker of this version its group."""

    def there() -> bool:
        groups = admin.zrange(KEYS.groups, 0, -1)
        schemas = [admin.hget(KEYS.group(name), "schema") for name in groups]
        known = admin.exists(POOL) and admin.hexists(MODELS, MODEL)
        return bool(known) and str(schema) in schemas

    await wait_until(there, what=f"a pool with schema {schema}")


async def too_new_is_told_once(pool: Release) -> None:
    told = '"schema_too_new"'
    await wait_until(lambda: told in pool.logs(), what="word of the newer jobs")
    assert pool.logs().count(told) == 1


class Load:
    """Jobs of version 1 that go on being enqueued while parts are exchanged."""

    def __init__(self, mill: Client) -> None:
        self._mill = mill
        self.jobs: list = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async for _ in ticks(0.1):
            text = f"{SHORT}{len(self.jobs)}"
            prompt = Prompt(text, model=MODEL, sampling=Sampling(max_tokens=8))
            self.jobs.append(await self._mill.submit(prompt, when_unserved="wait"))

    async def flows(self) -> None:
        """What is enqueued from now on ends as well."""
        count = len(self.jobs)
        await wait_until(lambda: len(self.jobs) > count)
        assert (await self.jobs[count].result(timeout=60)).text

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def long_jobs(mill: Client, count: int = 5) -> list:
    sampling = Sampling(max_tokens=8)
    prompts = [
        Prompt(f"{LONG}{i}", model=MODEL, sampling=sampling) for i in range(count)
    ]
    return await mill.submit_many(prompts, when_unserved="wait")


async def all_ended_well(admin: redis.Redis, jobs: list) -> None:
    for job in jobs:
        result = await job.result(timeout=60)
        assert result.state == "succeeded"
        record = admin.hgetall(KEYS.job(job.id))
        assert record.get("attempts", "0") == "0"
        assert record.get("lease_losses", "0") == "0"
    assert admin.xlen(KEYS.dead) == 0


async def test_a_rolling_upgrade_worker_first_loses_nothing(pool, admin) -> None:
    old_scheduler, old_worker = pool.scheduler(OLD), pool.worker(OLD)
    await lives(admin, schema=OLD)
    async with Client(pool.url) as mill:
        load = Load(mill)
        later = await long_jobs(mill)
        assert len(admin.get(KEYS.input(later[0].id))) < OFFLOAD
        await load.flows()
        assert {admin.hget(KEYS.job(job.id), "state") for job in later} == {"queued"}
        await too_new_is_told_once(pool)
        named = (await doctor(pool))[f"schema {KEYS.shard}"]
        assert named.severity == "warning"
        assert "version 2" in named.message
        assert "upgrade" in named.cure
        pool.worker(SCHEMA_VERSION)
        await lives(admin, schema=SCHEMA_VERSION)
        await asyncio.to_thread(pool.stop, old_worker)
        await load.flows()
        assert admin.hget(KEYS.job(later[0].id), "state") == "queued"
        pool.scheduler(SCHEMA_VERSION)
        await asyncio.to_thread(pool.stop, old_scheduler)
        await all_ended_well(admin, later)
        await load.flows()
        await load.end()
        await all_ended_well(admin, load.jobs)


async def test_a_new_scheduler_gives_an_old_worker_only_what_it_reads(
    pool, admin
) -> None:
    pool.scheduler(SCHEMA_VERSION)
    old_worker = pool.worker(OLD)
    await lives(admin, schema=OLD)
    async with Client(pool.url) as mill:
        load = Load(mill)
        later = await long_jobs(mill)
        await load.flows()
        assert {admin.hget(KEYS.job(job.id), "state") for job in later} == {"queued"}
        given = {admin.hget(KEYS.job(job.id), "dispatched_ms") for job in later}
        assert given == {None}
        named = (await doctor(pool))[f"schema {KEYS.shard}"]
        assert named.severity == "warning"
        pool.worker(SCHEMA_VERSION)
        await all_ended_well(admin, later)
        await asyncio.to_thread(pool.stop, old_worker)
        await load.flows()
        await load.end()
        await all_ended_well(admin, load.jobs)


async def test_jobs_of_the_next_release_wait_for_it(pool, admin) -> None:
    scheduler, worker = pool.scheduler(SCHEMA_VERSION), pool.worker(SCHEMA_VERSION)
    await lives(admin, schema=SCHEMA_VERSION)
    async with Client(pool.url) as mill:
        load = Load(mill)
        name = await asyncio.to_thread(pool.submit, NEXT, "from tomorrow")
        await load.flows()
        assert admin.hget(KEYS.job(name), "state") == "queued"
        await too_new_is_told_once(pool)
        pool.worker(NEXT)
        await lives(admin, schema=NEXT)
        pool.scheduler(NEXT)
        await asyncio.to_thread(pool.stop, scheduler)
        await asyncio.to_thread(pool.stop, worker)
        await all_ended_well(admin, [mill.job(name)])
        await load.end()
        await all_ended_well(admin, load.jobs)


async def test_a_worker_hands_back_what_it_cannot_read(pool, admin) -> None:
    pool.worker(SCHEMA_VERSION)

    def there() -> bool:
        return bool(admin.zrange(KEYS.groups, 0, -1))

    await wait_until(there)
    (group,) = admin.zrange(KEYS.groups, 0, -1)
    client = redis.asyncio.Redis.from_url(pool.url)
    scripts = Scripts(client, KEYS)
    fence = await scripts.acquire_scheduler("test", 60_000)
    newer = encode(JobRequest(v=NEXT, text="from tomorrow"))
    (job_id,) = await enqueue(scripts, newer)
    item = DispatchItem(
        job_id=job_id, tokens=2, token_ids=bytes(8), cost_blocks=1, bucket="128"
    )
    (reply,) = await scripts.dispatch(
        fence=fence, group=group, batch="b", lease_ms=9_000, items=[item]
    )
    # Without the entry's stream the script looks for it by itself.
    assert reply.status == "dispatched"

    def handed_back() -> bool:
        return admin.hget(KEYS.job(job_id), "state") == "queued"

    await wait_until(handed_back)
    record = admin.hgetall(KEYS.job(job_id))
    assert record.get("attempts", "0") == "0"
    assert record.get("lease_losses", "0") == "0"
    assert admin.xlen(KEYS.resume) == 1
    assert f"schema version {NEXT}" in pool.logs()
    await client.aclose()


async def enqueue(scripts: Scripts, *payloads: bytes) -> list[str]:
    jobs = [
        NewJob(
            id=JobId(MODEL, 0, new_unique()),
            payload=payload,
            payload_hash="h",
            job_class="interactive",
            tenant="default",
            bucket="128",
            tokens=2,
            max_tokens=2,
            seed=1,
            keep_ms=60_000,
        )
        for payload in payloads
    ]
    replies = await scripts.enqueue(jobs)
    assert {reply.status for reply in replies} == {"queued"}
    return [str(job.id) for job in jobs]


async def doctor(pool: Release) -> dict[str, Finding]:
    """What `tokenmill doctor` says of the shard."""
    client = connect(pool.url)
    try:
        found = await examine_shard(client, KEYS.shard, Config())
    finally:
        await client.aclose()
    return {one.name: one for one in found}
