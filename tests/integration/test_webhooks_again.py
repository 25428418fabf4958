"""Webhooks that someone asks to have delivered once more."""

import time

import pytest
from support.receiver import receiving
from support.shard_client import KEYS, Shard
from support.waiting import wait_until
from support.webhook_serving import came, serving, settled

from tokenmill import Client
from tokenmill.shared.errors import InvalidRequest, UnknownJob
from tokenmill.shared.webhook_keys import ANNOUNCED, QUEUE, delivery_key
from tokenmill.shared.webhooks import announce, ask_again

pytest_plugins = "support.webhook_fixtures"
pytestmark = pytest.mark.usefixtures("trusted")


async def test_redelivery_on_request(empty_redis, newest_redis):
    shard = await Shard(empty_redis).open("g1")
    async with receiving("404 None", "200 OK") as receiver, serving(newest_redis.url):
        job_id = await shard.enqueue(webhook=receiver.url())
        await shard.scripts.cancel(job_id)
        await settled(empty_redis, job_id, "given_up")
        async with Client(newest_redis.url) as mill:
            await mill.redeliver([job_id])
            await settled(empty_redis, job_id)
            (seen,) = await mill.webhooks(state="delivered")
            assert seen.attempts == 1
            # Also one that was delivered, and one whose record of delivery is gone.
            await mill.redeliver([job_id])
            await came(receiver, 3)
            await settled(empty_redis, job_id)
            await empty_redis.delete(delivery_key(job_id))
            await mill.redeliver([job_id])
            await came(receiver, 4)
            for unknown in ("nothing", "tiny.0.0000000000000000"):
                with pytest.raises(UnknownJob, match="no webhook"):
                    await mill.redeliver([job_id, unknown])
    assert set(receiver.ids) == {job_id}


async def test_a_delivery_that_waits_for_its_next_attempt_is_made_at_once(
    empty_redis, newest_redis
):
    slow = "503 Busy\r\nretry-after: 3600"
    async with (
        receiving(slow, "200 OK") as receiver,
        serving(newest_redis.url),
    ):
        await announce(empty_redis, receiver.url(), {"id": "later", "type": "t"})
        await came(receiver, 1)

        async def waits():
            due = await empty_redis.zscore(QUEUE, "webhook:later")
            return due and due > (time.time() + 1800) * 1000

        await wait_until(waits, what="the second attempt in an hour")
        async with Client(newest_redis.url) as mill:
            await mill.redeliver(["later"])
        await settled(empty_redis, "later")
    assert receiver.ids == ["later", "later"]


async def test_a_job_that_goes_on_is_not_told_again_and_keeps_its_webhook(
    empty_redis, newest_redis
):
    shard = await Shard(empty_redis).open("g1")
    async with receiving() as receiver, serving(newest_redis.url):
        job_id = await shard.enqueue(webhook=receiver.url())
        async with Client(newest_redis.url) as mill:
            with pytest.raises(InvalidRequest, match="queued"):
                await mill.redeliver([job_id])
        assert not await empty_redis.xlen(ANNOUNCED)
        # As a former release asks, or one that asked just before it was requeued.
        await ask_again(empty_redis, [job_id])
        await wait_until(lambda: nothing_queued(empty_redis), what="it was looked at")
        assert await empty_redis.zscore(KEYS.webhooks, job_id) is not None
        assert await shard.scripts.cancel(job_id) == "cancelled"
        await settled(empty_redis, job_id)
    assert receiver.ids == [job_id]


async def nothing_queued(client):
    return not await client.xlen(ANNOUNCED) and not await client.zcard(QUEUE)
