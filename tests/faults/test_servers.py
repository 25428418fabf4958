"""Servers that fail in their own ways: a clear error or recovery, never a hot loop."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import redis
from support.old_redis import old_redis
from support.pools import MODEL, UpProcess, clean_environment, up
from support.servers import SERVERS, RedisServer, free_port, running
from support.waiting import wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.errors import (
    RedisUnavailable,
    RedisUnsuitable,
    UnknownJob,
)
from tokenmill.shared.keys import MODELS, POOL, SCRIPTS, Keys
from tokenmill.shared.messages import encode
from tokenmill.shared.redis import Finding, connect
from tokenmill.shared.server_check import check_server

TEXT = "".join(chr(0x61 + i % 26) for i in range(300))
STEP = "echo:20"
QUICK = {
    "TOKENMILL_WORKER_LEASE_MS": "3000",
    "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000",
    "TOKENMILL_WORKER_DRAIN_S": "0.3",
}
COMMANDS = {
    "schedule": ("schedule",),
    "janitor": ("janitor",),
    "work": ("work", "--name", MODEL, "--engine", "echo"),
    "submit": ("submit", "hello", "--model", MODEL),
    "jobs": ("jobs",),
}
BUSY = 0.35
"""Of a core, over a process: far above a healthy one, far below a hot loop."""
LOOK_S = 3.0
SECRET = "hunter2-hunter2"


def prompt(text: str = TEXT) -> Prompt:
    return Prompt(text, model=MODEL, sampling=Sampling(max_tokens=5000))


def command(*words: str, url: str) -> subprocess.CompletedProcess[str]:
    """One command, run to its end in less than two minutes: nothing may hang."""
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", *words],
        env={**clean_environment(), "TOKENMILL_URL": url},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


async def findings(url: str) -> dict[str, Finding]:
    """What `tokenmill doctor` says of the server."""
    client = connect(url)
    try:
        return {one.name: one for one in await check_server(client)}
    finally:
        await client.aclose()


class Load:
    """What processor time the processes of a pool take."""

    def __init__(self, pool: UpProcess) -> None:
        self.family = [psutil.Process(pool.process.pid), *pool.family()]
        self.since = time.monotonic()
        self.before = {p.pid: self._used(p) for p in self.family}

    @staticmethod
    def _used(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    async def is_calm(self) -> None:
        """No process was busy since the beginning, a few seconds at least."""
        await wait_until(lambda: time.monotonic() - self.since > LOOK_S)
        elapsed = time.monotonic() - self.since
        for process in self.family:
            used = self._used(process) - self.before[process.pid]
            assert used / elapsed < BUSY, (process, used, elapsed)


async def check_refused_everywhere(url: str, words: str, tmp_path, **only: str) -> None:
    """Every part of a pool ends at once, with code 3 and a message that helps."""
    starting = {**COMMANDS, "up": ("up", "--url", url, "--state-dir", str(tmp_path))}
    chosen = {
        name: starting[name] for name in only.get("names", "").split() or starting
    }
    done = await asyncio.gather(
        *(asyncio.to_thread(command, *one, url=url) for one in chosen.values())
    )
    for name, one in zip(chosen, done, strict=True):
        assert one.returncode == 3, (name, one)
        assert words in one.stderr, (name, one.stderr)
        assert SECRET not in one.stderr + one.stdout, name


async def test_a_server_too_old_is_named_by_every_part(tmp_path) -> None:
    with old_redis() as (url, asked):
        await check_refused_everywhere(url, "Redis 5.0.14 is too old; 6.2", tmp_path)
        assert (await findings(url))["version"].severity == "error"
        names = {words[0].upper() for words in asked}
        assert not names & {"EVAL", "EVALSHA", "SET", "HSET", "XADD"}


async def test_a_wrong_password_is_named_and_not_shown(tmp_path) -> None:
    with running("8.2") as server:
        with redis.Redis(port=server.port) as admin:
            admin.config_set("requirepass", "right")
        url = server.url.replace("//", f"//:{SECRET}@")
        await check_refused_everywhere(url, "refused the user or password", tmp_path)
        found = command("doctor", url=url)
        assert found.returncode == 1
        assert "refused the user or password" in found.stdout
        assert SECRET not in found.stdout + found.stderr


async def test_a_user_without_permission_is_told_which(tmp_path) -> None:
    with running("8.2") as server:
        url = server.url.replace("//", f"//low:{SECRET}@")
        with redis.Redis(port=server.port) as admin:
            allowed = ("+ping", "+info", "+config|get", "~tm:*", "&*", "+@read")
            admin.execute_command("ACL", "SETUSER", "low", "on", f">{SECRET}", *allowed)
        await check_refused_everywhere(
            url, "lacks a permission", tmp_path, names="schedule janitor work up"
        )


async def test_a_replica_is_named_by_every_part(tmp_path) -> None:
    with running("6.2") as server:
        with redis.Redis(port=server.port) as admin:
            admin.replicaof("127.0.0.1", free_port())
        await check_refused_everywhere(server.url, "read-only replica", tmp_path)


@pytest.fixture(scope="module", params=SERVERS)
def server(request) -> Iterator[RedisServer]:
    with running(request.param, "--appendonly", "yes") as made:
        yield made


@pytest.fixture(scope="module")
def pool(server, tmp_path_factory) -> Iterator[UpProcess]:
    directory = tmp_path_factory.mktemp("pool")
    with up(directory, "--url", server.url, engine=STEP, **QUICK) as made:
        yield made


@pytest.fixture
def admin(server, pool) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        yield client


async def serves(url: str) -> None:
    async with Client(url) as mill:
        job = await mill.submit(prompt("works"), when_unserved="wait")
        assert (await job.result(timeout=60)).text == "works"


async def begun(job) -> None:
    async def first() -> None:
        async for delta in job.stream():
            if delta.token_ids:
                return

    await asyncio.wait_for(first(), 60)


def said(pool: UpProcess, event: str) -> int:
    return pool.logs().count(f'"{event}"')


async def test_flushall_under_load_tells_the_clients_and_recovers(pool, admin) -> None:
    async with Client(pool.url) as mill:
        jobs = [await mill.submit(prompt(TEXT + str(i))) for i in range(30)]
        await begun(jobs[0])
        stream = asyncio.create_task(_drain(jobs[1].stream()))
        waiting = [asyncio.create_task(job.result()) for job in jobs]
        load = Load(pool)
        admin.flushall()
        ended = await asyncio.wait_for(
            asyncio.gather(*waiting, stream, return_exceptions=True), 60
        )
        assert {type(error) for error in ended} == {UnknownJob}
        await serves(pool.url)
        await load.is_calm()
    for key in (POOL, MODELS, SCRIPTS):

        def published(key: str = key) -> bool:
            return bool(admin.exists(key))

        await wait_until(published, what=key)
    assert admin.hexists(MODELS, MODEL)


async def _drain(stream) -> None:
    async for _ in stream:
        pass


async def test_script_flush_is_not_noticed(pool, admin) -> None:
    async with Client(pool.url) as mill:
        job = await mill.submit(prompt())
        await begun(job)
        admin.script_flush()
        assert (await job.result(timeout=60)).text == TEXT


async def test_a_full_server_refuses_new_jobs_and_running_ones_go_on(
    pool, admin
) -> None:
    async with Client(pool.url) as mill:
        job = await mill.submit(prompt())
        await begun(job)
        before = set(admin.scan_iter("*"))
        admin.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(RedisUnsuitable, match=r"out of memory.*maxmemory"):
                await mill.submit(prompt("refused"))
            assert set(admin.scan_iter("*job:*")) <= before  # nothing half written
            refused = command("submit", "x", "--model", MODEL, url=pool.url)
            assert (refused.returncode, "out of memory" in refused.stderr) == (3, True)
            found = (await findings(pool.url))["memory"]
            assert found.severity == "error"
            assert "maxmemory" in found.cure
            load = Load(pool)
            await load.is_calm()
        finally:
            admin.config_set("maxmemory", 0)
        result = await job.result(timeout=60)
        assert result.text == TEXT
        assert admin.hget(Keys(MODEL, 0).job(job.id), "attempts") in (None, b"0")
    await serves(pool.url)


async def test_a_server_that_becomes_a_replica_and_comes_back(pool, admin) -> None:
    async with Client(pool.url) as mill:
        job = await mill.submit(prompt())
        await begun(job)
        # Of nobody: it keeps its data, as in a failover that is being decided.
        admin.replicaof("127.0.0.1", free_port())
        try:
            with pytest.raises(RedisUnsuitable, match=r"replica.*primary"):
                await mill.submit(prompt("refused"))
            with pytest.raises(RedisUnsuitable, match="replica"):
                async with Client(pool.url):
                    pass
            assert (await findings(pool.url))["role"].severity == "error"
            await Load(pool).is_calm()
        finally:
            admin.replicaof("NO", "ONE")
        assert (await job.result(timeout=60)).text == TEXT
    await serves(pool.url)


async def test_a_server_without_connections_left(pool, admin) -> None:
    before = admin.config_get("maxclients")["maxclients"]
    admin.config_set("maxclients", 1)  # those that there are stay
    try:
        with pytest.raises(RedisUnavailable, match=r"maxclients"):
            async with Client(pool.url):
                pass
        done = command("jobs", url=pool.url)
        assert (done.returncode, "maxclients" in done.stderr) == (3, True)
        found = (await findings(pool.url))["access"]
        assert (found.severity, "maxclients" in found.message) == ("error", True)
        await Load(pool).is_calm()
    finally:
        admin.config_set("maxclients", before)
    await serves(pool.url)


async def test_eviction_and_missing_persistence_are_named(pool, admin) -> None:
    admin.config_set("maxmemory", "1gb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("appendonly", "no")
    try:
        found = await findings(pool.url)
        assert found["maxmemory-policy"].severity == "error"
        assert "noeviction" in found["maxmemory-policy"].cure
        assert found["persistence"].severity == "warning"
        assert "appendonly yes" in found["persistence"].cure
    finally:
        admin.config_set("appendonly", "yes")
        admin.config_set("maxmemory", 0)
        admin.config_set("maxmemory-policy", "noeviction")


async def test_a_slow_subscriber_that_is_cut_off_misses_nothing(pool, admin) -> None:
    admin.config_set("client-output-buffer-limit", "pubsub 1mb 0 0")
    async with Client(pool.url) as mill:
        job = await mill.submit(prompt())
        stream = job.stream()
        first = await anext(stream)
        listener = mill._session.listener
        transport = listener._link.connection._writer.transport
        transport.pause_reading()
        # Deltas that were seen already, with much white space between them.
        seen = encode(first) + b" " * 200_000
        channel = Keys(MODEL, 0).wake(job.id)

        def cut_off() -> bool:
            return admin.publish(channel, seen) == 0

        await wait_until(cut_off)
        transport.resume_reading()
        texts = [first.text] + [delta.text async for delta in stream]
        assert "".join(texts) == TEXT
        assert listener.num_links == 2


async def test_a_server_that_loads_its_data_is_waited_for(pool, server, admin) -> None:
    with admin.pipeline(transaction=False) as pipe:
        for i in range(18_000):
            pipe.set(f"ballast:{i}", "x", ex=600)
        pipe.execute()
    async with Client(pool.url) as mill:
        job = await mill.submit(prompt())
        await begun(job)
        server.kill()
        # A third of a millisecond for each of eighteen thousand keys.
        server.extra = (*server.extra, "--key-load-delay", "300")
        server.start(wait=False)
        await wait_until(lambda: _is_loading(admin))
        load = Load(pool)
        found = await findings(pool.url)
        assert found["loading"].severity == "warning"
        await load.is_calm()
        assert (await job.result(timeout=60)).text == TEXT


def _is_loading(admin: redis.Redis) -> bool:
    try:
        return str(admin.info().get("loading")) == "1"
    except redis.RedisError:
        return False
