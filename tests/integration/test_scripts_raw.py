"""A client of another language: nothing but raw commands and published sources."""

import inspect
import json
import re

import pytest
from support.shard_client import KEYS, Shard, delta, new_job

from tokenmill.shared import versions
from tokenmill.shared.bulk import store as bulk_store
from tokenmill.shared.bulk import writes as bulk_writes
from tokenmill.shared.errors import ProtocolError, RedisUnsuitable
from tokenmill.shared.keys import SCRIPTS, lane_of, new_unique
from tokenmill.shared.script_runner import chunks, number
from tokenmill.shared.script_sources import load_script, script_names
from tokenmill.shared.scripts import EmitItem, Scripts

SHARD_KEYS = (
    *("load", "lanes", "recent", "deadline", "delayed", "bell", "limits", "rates"),
)


@pytest.fixture
async def shard(redis_client):
    shard = await Shard(redis_client).open("g1")
    await shard.scripts.publish_sources()
    return shard


def raw_enqueue(job_id: str, payload: str, **changes):
    """KEYS and ARGV as the header of enqueue.lua describes them."""
    prefix = "tm:{tiny:0}:"
    keys = [prefix + name for name in SHARD_KEYS]
    lane = lane_of("default")
    keys += [f"{prefix}job:{job_id}", f"{prefix}in:{job_id}"]
    keys += [f"{prefix}q:bulk:128:{lane}", f"{prefix}job:{job_id}"]
    facts = {
        "id": job_id,
        "hash": "h1",
        "class": "bulk",
        "bucket": "128",
        "lane": lane,
        "tokens": 3,
        "max_tokens": 8,
        "seed": "1",
        **changes,
    }
    return keys, [1, json.dumps(facts), payload]


async def test_a_job_is_enqueued_and_read_with_nothing_but_commands(shard):
    client = shard.client
    source = await client.hget(SCRIPTS, "enqueue")
    job_id = f"tiny.0.{new_unique()}"
    keys, args = raw_enqueue(job_id, '{"v":1,"text":"hi"}')
    reply = await client.eval(source, len(keys), *keys, *args)
    assert reply == [b"queued", job_id.encode(), b"", b""]
    lane = KEYS.queue("bulk", "128", lane_of("default"))
    assert (await shard.dispatch(job_id, entry_key=lane)).status == "dispatched"
    await shard.start(job_id, 1)
    await shard.emit(job_id, 1, 1, 0)
    await shard.finish(job_id, 1, 2)
    entries = await client.execute_command(
        "XRANGE", f"tm:{{tiny:0}}:tok:{job_id}", "-", "+"
    )
    deltas = [json.loads(f[b"d"]) for _, f in entries if b"d" in f]
    assert deltas == [{"token_ids": [0], "text": "x"}, {"end": {"state": "succeeded"}}]
    out = json.loads(await client.get(f"tm:{{tiny:0}}:out:{job_id}"))
    assert out["state"] == "succeeded"


@pytest.mark.parametrize(
    "damage",
    [
        lambda keys, args: (keys[:-1], args),
        lambda keys, args: (keys, args[:-1]),
        lambda keys, args: (keys, ["many", *args[1:]]),
        lambda keys, args: (keys, [2, *args[1:]]),
    ],
)
async def test_a_call_of_the_wrong_shape_is_refused_whole(shard, damage):
    keys, args = damage(*raw_enqueue(f"tiny.0.{new_unique()}", "{}"))
    with pytest.raises(RedisUnsuitable, match="2 arguments and 4 keys a job"):
        await shard.scripts.run("enqueue", keys, args)
    assert await shard.client.zcard(KEYS.recent) == 0


@pytest.mark.parametrize(
    ("index", "key"),
    [
        (8, "tm:{tiny:0}:job:other"),
        (9, "tm:{tiny:0}:in:other"),
        (10, "tm:{tiny:0}:q:bulk:128:999"),
        (11, "tm:{tiny:0}:idem:default:k"),
    ],
)
async def test_keys_that_do_not_match_the_arguments_are_named(shard, index, key):
    keys, args = raw_enqueue(f"tiny.0.{new_unique()}", "{}")
    keys[index] = key
    reply = await shard.client.eval(
        load_script("enqueue").source, len(keys), *keys, *args
    )
    assert reply[0] == b"invalid"
    assert reply[3].startswith(b"keys: expected")
    assert await shard.client.zcard(KEYS.recent) == 0


@pytest.mark.parametrize(
    "job_id", ["", "tiny", "tiny.0.UPPER0000000000", "tiny.0.a b", "*", "\x00"]
)
async def test_ids_that_cannot_be_one_are_refused(shard, job_id):
    keys, args = raw_enqueue(job_id, "{}")
    reply = await shard.client.eval(
        load_script("enqueue").source, len(keys), *keys, *args
    )
    assert (reply[0], reply[3][:3]) == (b"invalid", b"id:")


@pytest.mark.parametrize("bad", ["nan", "-1", "1.5", "", "x", "9" * 30])
async def test_garbage_numbers_stop_their_own_job_alone(shard, bad):
    one, two = [await shard.enqueue() for _ in range(2)]
    lane = KEYS.queue("interactive", "128", lane_of("default"))
    for field in ({"tokens": bad}, {"cost_blocks": bad}, {"choices": bad}):
        assert (await shard.dispatch(one, **field)).status == "no_credit"
    for job_id in (one, two):
        assert (await shard.dispatch(job_id, entry_key=lane)).status == "dispatched"
        assert (await shard.start(job_id, bad)).status == "lost"
        assert (await shard.start(job_id, 1)).status == "started"
    items = [
        EmitItem(one, bad, 1, b"{}"),
        EmitItem(one, 1, bad, b"{}"),
        EmitItem(two, 1, 1, delta(0)),
    ]
    statuses = await shard.scripts.emit(group="g1", items=items)
    assert statuses == ["lost", "lost", "written"]
    assert await shard.finish(one, bad) == "lost"
    assert await shard.finish(one, 1, seq=bad) == "recorded"
    assert (await shard.log(one))[-1][1]["end"]["state"] == "succeeded"
    assert (await shard.scripts.groups())[0].credit_blocks == 996


async def test_scripts_come_back_after_the_server_forgot_them(shard):
    assert (await shard.scripts.enqueue([new_job()]))[0].status == "queued"
    await shard.client.script_flush()
    assert (await shard.scripts.enqueue([new_job()]))[0].status == "queued"


async def test_all_sources_are_published_complete(shard):
    published = await shard.client.hgetall(SCRIPTS)
    assert sorted(name.decode() for name in published) == list(script_names())
    for name, source in published.items():
        assert b"--include" not in source, name
        assert await shard.client.script_load(source) == load_script(name.decode()).sha


@pytest.mark.parametrize("name", script_names())
def test_every_script_documents_its_keys_and_arguments(name):
    header = re.match(r"(--.*\n)+", load_script(name).source)[0]
    assert header.startswith(f"-- {name}: ")
    assert "-- KEYS 1 " in header
    assert "-- ARGV 1 " in header
    assert "-- Returns " in header


def test_scripts_use_only_the_clock_of_redis():
    for name in script_names():
        assert "os." not in load_script(name).source
        # Slow for large values: only the facts of a new job are read so.
        # Those of bulk runs read short lists of ids, those of routes a model's few.
        allowed = name in ("enqueue", "emit") or name.startswith(("bulk_", "route_"))
        assert "cjson" not in load_script(name).source or allowed


def test_chunks_respect_number_and_bytes():
    assert [len(c) for c in chunks(range(600))] == [256, 256, 88]
    mega = [b"x" * 3_000_000] * 3
    assert [len(c) for c in chunks(mega, len)] == [1, 1, 1]
    assert [len(c) for c in chunks([b"x" * 9_000_000, b"y"], len)] == [1, 1]
    assert list(chunks([])) == []


def test_a_reply_that_is_no_number_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="'abc'"):
        number(b"abc")


def test_wrappers_cover_every_script():
    """A script without a typed function would be dead weight."""
    text = "".join(
        inspect.getsource(module)
        for cls in Scripts.__mro__
        if (module := inspect.getmodule(cls)) and "scripts" in module.__name__
    )
    for module in (bulk_store, bulk_writes, versions):
        text += inspect.getsource(module)
    assert [n for n in script_names() if f'"{n}"' not in text] == []
