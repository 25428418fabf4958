"""The scheduler and the janitor as processes: signals, outages, a real tokenizer."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import redis
import redis.asyncio
from support.servers import SERVERS, RedisServer, running
from support.waiting import wait_until, wait_until_sync
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tokenmill.scheduler.loop import PoolScheduler
from tokenmill.shared.config import Config, SchedulerConfig
from tokenmill.shared.keys import (
    MODELS,
    POOL,
    SHARDS,
    JobId,
    Keys,
    new_unique,
    tokenizer_key,
)
from tokenmill.shared.messages import JobRequest, ModelCard, Sampling, encode
from tokenmill.shared.redis import connect
from tokenmill.shared.scripts import GroupInfo, NewJob, Scripts
from tokenmill.shared.tokens import ids_from_bytes, pack_tokenizer

KEYS = Keys("tiny", 0)
CARD = ModelCard(
    model="tiny",
    max_context=200,
    vocab_size=257,
    tokenizer="bytes",
    has_chat_template=True,
    weights_version="w1",
)


@contextmanager
def command(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    variables = {**os.environ, "TOKENMILL_LOG_FORMAT": "json"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def serve_group(client: "redis.asyncio.Redis", card: ModelCard = CARD) -> None:
    await client.hset(MODELS, "tiny", encode(card))
    info = GroupInfo(
        group="w-1",
        total_blocks=100,
        max_running=8,
        batch_tokens=1000,
        block_size=8,
        max_context=200,
        weights_version="w1",
    )
    await Scripts(client, KEYS).register_group("w-1", info, ttl_ms=60_000)


async def enqueue(client: "redis.asyncio.Redis", text: str = "hello") -> str:
    job = NewJob(
        id=JobId("tiny", 0, new_unique()),
        payload=encode(JobRequest(text=text, sampling=Sampling(max_tokens=5))),
        payload_hash="h",
        job_class="interactive",
        tenant="t",
        bucket="128",
        tokens=5,
        max_tokens=5,
        seed=1,
        keep_ms=60_000,
    )
    await Scripts(client, KEYS).enqueue([job])
    return str(job.id)


async def dispatched(client: "redis.asyncio.Redis", job_id: str) -> bool:
    return await client.hget(KEYS.job(job_id), "state") == b"dispatched"


@pytest.mark.parametrize("name", ["schedule", "janitor"])
def test_a_signal_ends_the_process_with_exit_0(newest_redis: RedisServer, name: str):
    with redis.Redis(port=newest_redis.port) as client:
        client.flushall()
        client.sadd(SHARDS, KEYS.shard)
        with command(name, "--url", newest_redis.url) as process:
            sign = (
                (lambda: client.hget(KEYS.scheduler, "owner"))
                if name == "schedule"
                else (lambda: client.keys("arq:*"))
            )
            wait_until_sync(sign, what=f"a running {name}")
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output.decode()
        assert b"_stopped" in output
        if name == "schedule":
            assert not client.hget(KEYS.scheduler, "owner")


async def test_a_restart_of_redis_is_survived():
    config = Config(scheduler=SchedulerConfig(leader_lease_ms=300))
    with running(
        SERVERS[-1], "--appendonly", "yes", "--appendfsync", "always"
    ) as server:
        client = connect(server.url, socket_timeout_s=1.0)
        other = redis.asyncio.Redis.from_url(server.url)
        scheduler = asyncio.create_task(PoolScheduler(client, config).run())
        try:
            await serve_group(other)
            first = await enqueue(other)
            await wait_until(lambda: dispatched(other, first), what="the first job")
            await other.aclose()
            server.kill()
            server.start()
            await serve_group(other)
            second = await enqueue(other)
            await wait_until(lambda: dispatched(other, second), what="the second job")
        finally:
            scheduler.cancel()
            await asyncio.gather(scheduler, return_exceptions=True)
            await client.aclose()
            await other.aclose()


async def test_a_tokenizer_from_redis_is_used_once_it_is_there(
    redis_client: "redis.asyncio.Redis", tmp_path: Path
):
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(["hello hello hello"], trainer)
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    }
    fingerprint, bundle = pack_tokenizer(files)
    card = msgspec.structs.replace(CARD, tokenizer=fingerprint)
    await redis_client.set(tokenizer_key(fingerprint), bundle)
    scheduler = asyncio.create_task(PoolScheduler(redis_client, Config()).run())
    try:
        await serve_group(redis_client, card)
        job_id = await enqueue(redis_client, "hello hello")
        await wait_until(lambda: dispatched(redis_client, job_id), what="the job")
        ids = ids_from_bytes(await redis_client.get(KEYS.ids(job_id)))
        assert ids == backend.encode("hello hello").ids
        assert await redis_client.exists(POOL)
    finally:
        scheduler.cancel()
        await asyncio.gather(scheduler, return_exceptions=True)


def test_help_needs_no_model_stack():
    code = (
        "import sys, typer; from tokenmill.scheduler.cli import register;"
        "register(typer.Typer());"
        "bad = {'torch', 'transformers', 'arq', 'redis'} & set(sys.modules);"
        "assert not bad, bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
