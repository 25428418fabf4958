"""Webhooks in the janitor: noticed in several ways, delivered at least once."""

import contextlib

import pytest
import redis.asyncio
from support.receiver import receiving
from support.shard_client import KEYS, Shard
from support.waiting import wait_until
from support.webhook_serving import CONFIG, SECRET, came, serving, settled

from tokenmill import Client, SyncClient
from tokenmill.scheduler import webhook_service, webhook_turns
from tokenmill.scheduler import webhooks as webhooks_module
from tokenmill.scheduler.webhooks import Webhooks
from tokenmill.shared.errors import InvalidRequest, UnknownJob
from tokenmill.shared.webhook_keys import ANNOUNCED, OPEN, QUEUE, delivery_key
from tokenmill.shared.webhooks import (
    MOST_EVENT_BYTES,
    WebhookEvent,
    announce,
    ask_again,
    verify,
)

pytest_plugins = "support.webhook_fixtures"
pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def client(empty_redis):
    return empty_redis


async def forgotten(client):
    return not await client.exists(KEYS.webhooks, OPEN, QUEUE)


async def test_the_end_of_a_job_is_delivered_once(client, newest_redis):
    shard = await Shard(client).open("g1")
    async with receiving() as receiver, serving(newest_redis.url):
        plain = await shard.enqueue()
        job_id = await shard.enqueue(webhook=receiver.url())
        for name in (plain, job_id):
            assert await shard.scripts.cancel(name) == "cancelled"
        await came(receiver, 1)
        await settled(client, job_id)
        await wait_until(lambda: forgotten(client), what="nothing left to be done")
    assert receiver.ids == [job_id]
    # Nothing of it stays for ever, and nothing is pickled.
    async for name in client.scan_iter("arq:*"):
        assert await client.pttl(name) != -1


async def test_a_run_or_batch_announces_its_own(client, newest_redis):
    async with receiving("503 Busy\r\nretry-after: 3600", "200 OK") as receiver:
        event = WebhookEvent(
            id="batch_1.completed",
            type="batch.completed",
            data={"id": "batch_1", "tenant": "acme"},
        )
        await announce(client, receiver.url("/first"), event)
        await announce(client, receiver.url("/second"), event)  # the same id
        async with serving(newest_redis.url):
            await came(receiver, 1)
            plain = {"id": "r1.complete", "type": "bulk.complete", "total": 3}
            await announce(client, receiver.url(), plain)
            await came(receiver, 2)
            async with Client(newest_redis.url) as mill:
                await wait_until(lambda: _pending(mill, 1), what="one that waits")
                await settled(client, "r1.complete")
                (waiting,) = await mill.webhooks(state="pending")
    assert not await client.xlen(ANNOUNCED)
    assert (waiting.id, waiting.tenant) == ("batch_1.completed", "acme")
    assert (waiting.status, waiting.attempts) == (503, 1)
    by_id = {got.headers["webhook-id"]: got for got in receiver.requests}
    told = by_id["batch_1.completed"]
    assert told.path == "/first"
    assert told.json["type"] == "batch.completed"
    assert told.json["data"] == {"id": "batch_1", "tenant": "acme"}
    assert by_id["r1.complete"].json["data"] == {"total": 3}
    assert all(verify(SECRET, got.headers, got.body) for got in receiver.requests)


async def _pending(mill, attempts):
    found = await mill.webhooks(state="pending")
    return found and found[0].attempts == attempts


@pytest.mark.parametrize(
    "event",
    [
        WebhookEvent(id="", type="x", data={}),
        WebhookEvent(id="a b", type="x", data={}),
        WebhookEvent(id="x" * 201, type="x", data={}),
        WebhookEvent(id="x", type="x", data={"a": "x" * MOST_EVENT_BYTES}),
    ],
)
async def test_what_cannot_be_an_event_is_refused(client, event):
    with pytest.raises(InvalidRequest):
        await announce(client, "https://example.com/", event)
    assert not await client.xlen(ANNOUNCED)


async def test_garbage_among_announcements_stops_nothing(client, newest_redis):
    await client.xadd(ANNOUNCED, {"x": "y"})
    await client.xadd(ANNOUNCED, {"id": "bad", "again": "1"})
    await client.xadd(
        ANNOUNCED, {"id": "odd", "url": "nowhere", "type": "t", "data": "no json"}
    )
    async with receiving() as receiver, serving(newest_redis.url):
        await announce(client, receiver.url(), {"id": "good", "type": "t"})
        await settled(client, "good")
        await settled(client, "odd", "given_up")
    assert not await client.xlen(ANNOUNCED)


async def test_what_a_killed_janitor_left_is_delivered(client, newest_redis):
    """It died in the midst of an attempt: the task and its lock are still there."""
    shard = await Shard(client).open("g1")
    async with receiving(None, "200 OK") as receiver:
        job_id = await shard.enqueue(webhook=receiver.url())
        await shard.scripts.cancel(job_id)
        async with serving(newest_redis.url):
            await came(receiver, 1)
            lock = f"arq:in-progress:webhook:{job_id}"
            held = await client.dump(lock)
            kept = await client.dump(f"arq:job:webhook:{job_id}")
        # As a kill leaves it; arq itself tidies up when it is cancelled.
        await client.restore(lock, 300, held, replace=True)
        await client.restore(f"arq:job:webhook:{job_id}", 60_000, kept, replace=True)
        await client.zadd(QUEUE, {f"webhook:{job_id}": 1})
        async with serving(newest_redis.url):
            await came(receiver, 2)
            await settled(client, job_id)
    assert receiver.ids == [job_id, job_id]
    assert await client.hget(delivery_key(job_id), "attempts") == b"2"


async def test_the_sweep_finds_what_nobody_was_told_of(client, monkeypatch):
    """Ends that a former release wrote, events that were trimmed, lost tasks."""
    monkeypatch.setattr(webhooks_module, "OVERDUE_MS", 0)
    monkeypatch.setattr(webhooks_module, "COUNT", 2)
    shard = await Shard(client).open("g1")
    url = "https://example.com/"
    waiting = [await shard.enqueue(webhook=url) for _ in range(3)]
    ended = [await shard.enqueue(webhook=url) for _ in range(3)]
    for job_id in ended:
        await shard.scripts.cancel(job_id)
    gone = await shard.enqueue(webhook=url)
    await shard.scripts.cancel(gone)
    await client.delete(KEYS.job(gone), KEYS.done)
    await client.zadd(OPEN, {"batch_1": 1})
    hooks = Webhooks(client)
    assert await hooks.sweep() == 5
    queued = {name.decode() for name in await client.zrange(QUEUE, 0, -1)}
    assert queued == {f"webhook:{name}" for name in [*ended, gone, "batch_1"]}
    # Again: arq has them, so nothing is queued twice.
    assert await hooks.sweep() == 5
    assert await client.zcard(QUEUE) == 5
    assert set(waiting).isdisjoint(queued)


async def test_the_sweep_needs_no_place_among_deliveries(
    client, newest_redis, monkeypatch
):
    monkeypatch.setattr(webhook_service, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(webhook_service, "SWEEP_S", 0.05)
    async with receiving(None) as hung, serving(newest_redis.url):
        await announce(client, hung.url(), {"id": "hangs", "type": "t"})
        await came(hung, 1)
        await client.zadd(OPEN, {"missed": 1})

        async def found():
            return await client.zscore(QUEUE, "webhook:missed") is not None

        # Long before the hung one gives up.
        await wait_until(found, timeout_s=CONFIG.webhooks.timeout_s / 2, what="a sweep")
        assert hung.connections == 1


async def test_hundreds_for_a_host_that_hangs_are_put_off_and_not_begun(
    client, newest_redis
):
    """Else one for another host stands behind a task of each of them."""
    async with receiving(None) as hung, receiving() as good:
        for number in range(400):
            event = {"id": f"hung{number}", "type": "t"}
            await announce(client, hung.url(), event)
        await announce(client, good.url(), {"id": "good", "type": "t"})
        async with serving(newest_redis.url):
            await came(good, 1)
            begun = await client.keys("arq:retry:webhook:hung*")
            assert len(begun) < 200
            assert hung.connections <= webhook_turns.PER_TARGET

            async def put_off():
                (now_s, _) = await client.time()
                return await client.zcount(QUEUE, now_s * 1000, "+inf") > 200

            await wait_until(put_off, what="those without a place wait")


async def test_the_last_places_are_for_hosts_that_have_none(
    client, newest_redis, monkeypatch
):
    monkeypatch.setattr(webhook_service, "MOST_AT_ONCE", 4)
    async with receiving(None) as hung, receiving() as good:
        for number in range(20):
            event = {"id": f"hung{number}", "type": "t"}
            await announce(client, hung.url(), event)
        async with serving(newest_redis.url):
            await came(hung, 3)
            for number in range(3):
                await announce(client, good.url(), {"id": f"g{number}", "type": "t"})
            await came(good, 3)
            assert len(hung.requests) == 3


async def test_a_tenant_whose_hosts_hang_leaves_places_for_others(
    client, newest_redis, monkeypatch
):
    monkeypatch.setattr(webhook_service, "MOST_AT_ONCE", 4)
    async with contextlib.AsyncExitStack() as stack:
        hung = [await stack.enter_async_context(receiving(None)) for _ in range(6)]
        good = await stack.enter_async_context(receiving())
        for number, host in enumerate(hung):
            event = {"id": f"hung{number}", "type": "t", "tenant": "greedy"}
            await announce(client, host.url(), event)
        await stack.enter_async_context(serving(newest_redis.url))

        def waiting():
            return sum(len(host.requests) for host in hung)

        await wait_until(lambda: waiting() == 3, what="as many as it may have")
        for number in range(3):
            event = {"id": f"good{number}", "type": "t", "tenant": "modest"}
            await announce(client, good.url(), event)
        await came(good, 3)
        assert waiting() == 3


async def test_what_was_put_off_is_delivered_in_its_turn(
    client, newest_redis, monkeypatch
):
    monkeypatch.setattr(webhook_turns, "PER_TARGET", 1)
    async with receiving() as receiver:
        for number in range(6):
            await announce(client, receiver.url(), {"id": f"e{number}", "type": "t"})
        async with serving(newest_redis.url):
            await came(receiver, 6)
    assert sorted(receiver.ids) == sorted(f"e{number}" for number in range(6))


async def test_what_is_said_of_one_event_together_is_taken_in_its_order(client):
    hooks = Webhooks(client)
    await announce(client, "https://example.com/1", {"id": "one", "type": "t"})
    await announce(client, "https://example.com/2", {"id": "one", "type": "t"})
    await ask_again(client, ["one", "unknown"])
    await client.xadd(ANNOUNCED, {"x": "y"})
    assert await hooks.take_announced() == 5
    assert not await client.xlen(ANNOUNCED)
    record = await client.hgetall(delivery_key("one"))
    assert record[b"url"] == b"https://example.com/1"
    assert (record[b"state"], record[b"attempts"]) == (b"pending", b"0")
    assert {n.decode() for n in await client.zrange(QUEUE, 0, -1)} == {
        *("webhook:one", "webhook:unknown"),
    }


async def test_overdue_deliveries_are_looked_at_some_at_a_time(client, monkeypatch):
    monkeypatch.setattr(webhooks_module, "COUNT", 3)
    await client.zadd(OPEN, {f"batch_{number}": 1 for number in range(10)})
    assert await Webhooks(client).sweep() == 10
    assert await client.zcard(QUEUE) == 10


async def test_many_announcements_wait_for_a_janitor(client):
    pipe = client.pipeline(transaction=False)
    for _ in range(12_000):
        pipe.xadd(ANNOUNCED, {"id": "x"})
    await pipe.execute()
    await announce(client, "https://example.com/", {"id": "last", "type": "t"})
    assert await client.xlen(ANNOUNCED) == 12_001


def test_the_sync_client_lists_them_too(newest_redis):
    with redis.Redis.from_url(newest_redis.url) as raw:
        raw.flushall()
    with SyncClient(newest_redis.url) as mill:
        assert mill.webhooks() == []
        assert mill.usage() == []
        with pytest.raises(UnknownJob):
            mill.redeliver(["nothing"])
