"""How the scheduler's processes begin: no Redis, and a tokenizer named early."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time

import msgspec
import pytest
import redis.asyncio
from structlog.testing import capture_logs
from support.waiting import wait_until

from tokenmill.scheduler import orchestrator, tokenizing
from tokenmill.scheduler.loop import PoolScheduler
from tokenmill.scheduler.outage import require_redis
from tokenmill.shared.config import Config, StorageConfig
from tokenmill.shared.errors import RedisUnavailable
from tokenmill.shared.keys import POOL, SHARDS, WARM, Keys, tokenizer_key
from tokenmill.shared.messages import PoolCard
from tokenmill.shared.redis import connect
from tokenmill.shared.tokens import BYTES, load_tokenizer

KEYS = Keys("tiny", 0)


@pytest.mark.parametrize("name", ["schedule", "janitor"])
def test_without_redis_the_process_says_so_and_exits_3(name: str):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", name, "--url", "redis://127.0.0.1:1/0"],
        env={**os.environ, "TOKENMILL_LOG_FORMAT": "json"},
        capture_output=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 3
    assert time.monotonic() - begin < 60
    [line] = done.stderr.decode().strip().splitlines()
    assert "127.0.0.1:1" in line
    assert done.stdout == b""


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tokenmill.scheduler.outage.START_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        client = connect(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(RedisUnavailable, match="did not answer within"):
            await require_redis(client)
        await client.aclose()


async def test_a_tokenizer_named_early_is_loaded_before_the_model_has_a_card(
    redis_client: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
):
    loaded: list[object] = []

    def load(bundle: object) -> object:
        loaded.append(bundle)
        return load_tokenizer(BYTES)

    monkeypatch.setattr(tokenizing, "load_tokenizer", load)
    await redis_client.set(tokenizer_key("f" * 32), b"bundle")
    await redis_client.hset(WARM, "tiny", "f" * 32)  # type: ignore[misc]
    await redis_client.sadd(SHARDS, KEYS.shard)
    task = asyncio.create_task(PoolScheduler(redis_client, Config()).run())
    try:
        await wait_until(lambda: b"bundle" in loaded, what="the tokenizer")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_janitor_is_quiet_when_it_has_nothing_to_do(
    redis_client: "redis.asyncio.Redis",
):
    await redis_client.sadd(SHARDS, KEYS.shard)
    with capture_logs() as logs:
        for task in ("trim_streams", "remove_groups", "find_orphans"):
            await getattr(orchestrator, task)({"redis": redis_client})
    assert {line["log_level"] for line in logs} == {"debug"}
    assert len(logs) == 4


@contextlib.asynccontextmanager
async def scheduler(client: "redis.asyncio.Redis", config: Config):
    task = asyncio.create_task(PoolScheduler(client, config).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_shards_are_registered_again_after_a_flush(
    redis_client: "redis.asyncio.Redis",
):
    async with scheduler(redis_client, Config()):
        await redis_client.sadd(SHARDS, KEYS.shard)
        await wait_until(lambda: redis_client.exists(KEYS.scheduler), what="a leader")
        await redis_client.flushall()
        await wait_until(
            lambda: redis_client.sismember(SHARDS, KEYS.shard), what="the shard"
        )


async def test_pools_with_one_store_have_a_directory_each(
    redis_client: "redis.asyncio.Redis", tmp_path
):
    settings = redis_client.connection_pool.connection_kwargs
    other = redis.asyncio.Redis(host=settings["host"], port=settings["port"], db=1)
    config = Config(storage=StorageConfig(url=f"file://{tmp_path}"))

    async def place(client: "redis.asyncio.Redis") -> str:
        raw = await wait_until(lambda: client.get(POOL), what="the pool's card")
        url = msgspec.json.decode(raw, type=PoolCard).storage_url
        assert url is not None
        assert url.startswith(f"file://{tmp_path}/pool-")
        return url

    async with scheduler(redis_client, config), scheduler(other, config):
        first = await place(redis_client)
        assert await place(other) != first
    await redis_client.delete(POOL)
    async with scheduler(redis_client, config):
        assert await place(redis_client) == first
    await other.aclose()


async def test_a_shard_whose_task_ended_is_scheduled_again(
    redis_client: "redis.asyncio.Redis",
):
    await redis_client.sadd(SHARDS, KEYS.shard)
    made = PoolScheduler(redis_client, Config())
    task = asyncio.create_task(made.run())
    try:
        await wait_until(lambda: redis_client.exists(KEYS.scheduler), what="a leader")
        first = made._shards[KEYS.shard]
        first.cancel()
        await wait_until(
            lambda: made._shards.get(KEYS.shard) not in (None, first),
            what="a new task",
        )
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
