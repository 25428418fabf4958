"""How the scheduler's processes begin: no Redis, and a tokenizer named early."""

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest
import redis.asyncio
from structlog.testing import capture_logs
from support.waiting import wait_until

from tokenmill.scheduler import orchestrator, tokenizing
from tokenmill.scheduler.loop import PoolScheduler
from tokenmill.scheduler.outage import require_redis
from tokenmill.shared.config import Config
from tokenmill.shared.errors import RedisUnavailable
from tokenmill.shared.keys import SHARDS, WARM, Keys, tokenizer_key
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
        timeout=30,
    )
    assert done.returncode == 3
    assert time.monotonic() - begin < 25
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
