"""A client that has nothing but docs/protocol.md and a Redis library.

Only the group that answers comes from tokenmill.
"""

import asyncio
import hashlib
import json
import os
import re
import time
import zlib
from pathlib import Path

import pytest
import redis
from support.fake_group import FakeGroup
from support.waiting import wait_until

from tokenmill.shared.scripts import Limits

MODEL = "smollm2-135m"
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.fixture
async def group(redis_client):
    async with FakeGroup(redis_client, delay_s=0.002) as fake:
        yield fake


class Foreign:
    """The document's words as code, on raw commands alone."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url)
        self.pool = json.loads(self.command("GET", "tm:pool"))

    def command(self, *words):
        return self.redis.execute_command(*words)

    def script(self, name: str, keys, args):
        source = self.command("HGET", "tm:scripts", name)
        return self.command("EVAL", source, len(keys), *keys, *args)

    def enqueue(self, payload: bytes, *, tenant="t1", idem="", unique=None, **more):
        now = time.time_ns() // 1_000_000
        unique = unique or f"{now:011x}{os.urandom(10).hex()}"
        source = f"{tenant}\0{idem or unique}".encode()
        self.partition = zlib.crc32(source) % self.pool["partitions"]
        prefix = f"tm:{{{MODEL}:{self.partition}}}:"
        job_id = f"{MODEL}.{self.partition}.{unique}"
        lane = zlib.crc32(tenant.encode()) % 256
        job = f"{prefix}job:{job_id}"
        keys = [
            f"{prefix}{name}"
            for name in (
                *("load", "lanes", "recent", "deadline", "delayed", "bell"),
                *("limits", "rates"),
            )
        ]
        keys += [job, f"{prefix}in:{job_id}", f"{prefix}q:bulk:128:{lane}"]
        keys += [f"{prefix}idem:{tenant}:{idem}" if idem else job]
        facts = {
            "id": job_id,
            "hash": hashlib.sha256(payload).hexdigest(),
            "class": "bulk",
            "tenant": tenant,
            "bucket": "128",
            "lane": lane,
            "tokens": 5,
            "max_tokens": 128,
            "seed": "42",
            "keep_ms": self.pool["retention_ms"],
        }
        facts |= {"idempotency_key": idem} if idem else {}
        args = [1, json.dumps(facts | more), payload]
        self.command("SADD", "tm:shards", f"{MODEL}:{self.partition}")
        return [part.decode() for part in self.script("enqueue", keys, args)]

    def result(self, job_id: str) -> dict:
        prefix = f"tm:{{{MODEL}:{self.partition}}}:"
        with self.redis.pubsub() as pubsub:
            pubsub.subscribe(f"{prefix}wake:{job_id}")
            assert pubsub.get_message(timeout=60)["type"] == "subscribe"
            while True:
                raw = self.command("GET", f"{prefix}out:{job_id}")
                if raw is not None:
                    return json.loads(raw)
                pubsub.get_message(ignore_subscribe_messages=True, timeout=5)

    def log(self, job_id: str) -> list[dict]:
        prefix = f"tm:{{{MODEL}:{self.partition}}}:"
        entries = self.command("XRANGE", f"{prefix}tok:{job_id}", "-", "+")
        return [json.loads(f[b"d"]) for _, f in entries if b"d" in f]

    def cancel(self, job_id: str) -> str:
        prefix = f"tm:{{{MODEL}:{self.partition}}}:"
        job = f"{prefix}job:{job_id}"
        fields = ("state", "owner", "entry_key", "idem", "tenant")
        _, owner, entry, idem, tenant = (
            (value or b"").decode() for value in self.command("HMGET", job, *fields)
        )
        keys = [
            f"{prefix}{name}"
            for name in (
                "lease",
                "deadline",
                "delayed",
                "load",
                "lanes",
                "done",
                "bell",
                "resume",
            )
        ]
        keys += (
            [f"{prefix}group:{owner}", f"{prefix}ctl:{owner}"] if owner else [job] * 2
        )
        keys += [entry or job, job]
        keys += [f"{prefix}{k}:{job_id}" for k in ("in", "ids", "out", "tok", "wake")]
        keys += [f"{prefix}idem:{tenant}:{idem}" if idem else job]
        error = {"code": "cancelled", "message": "cancelled on request"}
        result = {"id": job_id, "state": "cancelled", "model": MODEL, "error": error}
        end = {"end": {"state": "cancelled", "error": error}}
        args = [job_id, owner, entry, json.dumps(result), json.dumps(end)]
        return self.script("cancel", keys, args).decode()


@pytest.fixture
async def foreign(group, redis_server):
    client = await asyncio.to_thread(Foreign, redis_server.url)
    yield client
    client.redis.close()


def request(text: str, **sampling) -> bytes:
    return json.dumps({"text": text, "sampling": sampling}).encode()


async def test_a_foreign_client_enqueues_and_reads(foreign) -> None:
    status, job_id, _, _ = foreign.enqueue(request("grüße from afar"))
    assert status == "queued"
    result = await asyncio.to_thread(foreign.result, job_id)
    assert result["state"] == "succeeded"
    assert result["choices"][0]["text"] == "grüße from afar"
    log = foreign.log(job_id)
    assert "".join(d.get("text", "") for d in log) == "grüße from afar"
    assert [d.get("offset", 0) for d in log[:-1]] == [0, 1, 2]
    assert log[-1]["end"]["state"] == "succeeded"


async def test_a_repeated_call_is_known(foreign, group) -> None:
    await group.pause()
    unique = "a" * 31
    first = foreign.enqueue(request("x"), unique=unique)
    again = foreign.enqueue(request("x"), unique=unique)
    assert (first[0], again[0], again[1]) == ("queued", "duplicate", first[1])
    keyed = foreign.enqueue(request("x"), idem="k")
    assert foreign.enqueue(request("x"), idem="k")[:2] == ["duplicate", keyed[1]]
    assert foreign.enqueue(request("y"), idem="k")[0] == "conflict"


async def test_a_wrong_argument_is_named(foreign) -> None:
    status, _, _, detail = foreign.enqueue(request("x"), unique="NOT-AN-ID")
    assert status == "invalid"
    assert "id" in detail


async def test_limits_need_no_client_that_knows_them(foreign, group) -> None:
    await group.pause()
    await group.scripts.write_limits(Limits(tenant_waiting_jobs=1))
    assert foreign.enqueue(request("x"))[0] == "queued"
    status, _, retry_ms, detail = foreign.enqueue(request("y"))
    assert (status, detail.partition(":")[0]) == ("full", "tenant_waiting_jobs")
    assert int(retry_ms) > 0
    assert foreign.enqueue(request("y"), tenant="t2")[0] == "queued"


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"delay": 5}, "delay is not known"),
        ({"class": None, "lane": 3}, "keys"),
        ({"seed": 7}, "seed"),
        ({"tokens": "5"}, "tokens"),
        ({"tokens": 1e300}, "tokens"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"refuse_late": 1}, "refuse_late"),
        ({"class": ["bulk"]}, "class"),
        ({"hash": {}}, "hash"),
        ({"id": 5}, "id"),
    ],
)
async def test_a_wrong_fact_is_named(foreign, group, facts, word) -> None:
    await group.pause()
    status, _, _, detail = foreign.enqueue(request("x"), **facts)
    assert status == "invalid"
    assert word in detail


async def test_cancel_works_in_the_queue_and_in_mid_stream(foreign, group) -> None:
    await group.pause()
    waiting = foreign.enqueue(request("x"), idem="key-1")[1]
    assert foreign.cancel(waiting) == "cancelled"
    result = await asyncio.to_thread(foreign.result, waiting)
    assert result["error"]["code"] == "cancelled"
    group.serving.set()
    group.delay_s = 0.05
    running = foreign.enqueue(request("a " * 100))[1]
    await wait_until(lambda: foreign.log(running))
    assert foreign.cancel(running) == "cancelling"
    result = await asyncio.to_thread(foreign.result, running)
    assert result["state"] == "cancelled"
    assert foreign.cancel(running) == "cancelled"


async def test_our_client_reads_what_a_foreign_one_wrote(
    foreign, group, redis_server
) -> None:
    from tokenmill import Client
    from tokenmill.shared.errors import JobCancelled

    await group.pause()
    job_id = foreign.enqueue(request("hello there"))[1]
    other = foreign.enqueue(request("never run"))[1]
    async with Client(redis_server.url) as mill:
        waiting = asyncio.ensure_future(mill.job(other).result(60))
        await wait_until(lambda: mill._session.listener._watchers)
        assert foreign.cancel(other) == "cancelled"
        with pytest.raises(JobCancelled):
            await waiting
        group.serving.set()
        deltas = [delta.text async for delta in mill.job(job_id).stream()]
        assert deltas == ["hello", " there"]


async def test_the_documents_own_client_works(group, redis_server) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PROTOCOL.read_text(), re.S)
    names = {"redis_url": redis_server.url, "prompt": "one two three"}
    await asyncio.to_thread(exec, compile(source, str(PROTOCOL), "exec"), names)
    assert names["text"] == "one two three"
    assert names["end"]["state"] == "succeeded"
    assert names["end"]["usage"]["completion_tokens"] == 3


def test_the_document_names_every_field_and_limit() -> None:
    from tokenmill.shared import messages, script_types

    text = PROTOCOL.read_text()
    structs = (
        messages.Sampling,
        messages.JobRequest,
        messages.Delta,
        messages.End,
        messages.PoolCard,
        messages.ModelCard,
        messages.JobResult,
    )
    for struct in structs:
        missing = [f for f in struct.__struct_fields__ if f not in text]
        assert not missing, f"{struct.__name__}: {missing}"
    assert script_types.EnqueueReply.__struct_fields__ == (
        "status",
        "job_id",
        "retry_after_s",
        "detail",
        "needed_s",
    )
