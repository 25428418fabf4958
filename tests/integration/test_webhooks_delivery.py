"""Attempts of webhooks: what is sent, what is delivered, when it is tried again."""

import asyncio

import pytest
import structlog
from support.receiver import receiving
from support.shard_client import KEYS, new_job
from support.waiting import wait_until
from support.webhook_cases import SECRET, attempt, deliverer, ended

from tokenmill.scheduler import webhook_turns
from tokenmill.scheduler.webhook_delivery import retry_after_s, wait_after
from tokenmill.scheduler.webhook_records import KEEP_MS, Records
from tokenmill.shared.config import WebhooksConfig
from tokenmill.shared.webhook_keys import LOG, OPEN, delivery_key
from tokenmill.shared.webhooks import deliveries, verify

pytest_plugins = "support.webhook_fixtures"
pytestmark = pytest.mark.usefixtures("trusted")


async def test_the_end_of_a_job_is_told_signed_and_with_its_output(shard):
    async with receiving("204 No Content") as receiver:
        job_id = await ended(shard, receiver.url("/hook?key=1"), text="Grüße")
        assert await attempt(shard.client, job_id) is None
        # Settled: nothing is sent again.
        assert await attempt(shard.client, job_id) is None
    (got,) = receiver.requests
    assert got.path == "/hook?key=1"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert got.headers["webhook-id"] == job_id
    assert verify(SECRET, got.headers, got.body)
    assert not verify("another secret of size", got.headers, got.body)
    assert not verify(SECRET, got.headers, got.body + b" ")
    told = got.json
    assert told["type"] == "job.succeeded"
    assert told["timestamp"].endswith("Z")
    data = told["data"]
    assert data["id"] == job_id
    assert (data["state"], data["model"], data["tenant"]) == (
        *("succeeded", "tiny", "default"),
    )
    assert data["usage"] == {"prompt_tokens": 12, "completion_tokens": 1}
    assert data["enqueued_ms"] <= data["started_ms"] <= data["finished_ms"]
    assert data["output"] == [{"index": 0, "text": "Grüße", "finish_reason": "stop"}]
    assert not await shard.client.zcard(KEYS.webhooks)
    assert not await shard.client.zcard(OPEN)
    (seen,) = await deliveries(shard.client)
    assert (seen.state, seen.attempts, seen.status) == ("delivered", 1, 204)
    assert seen.target == f"http://127.0.0.1:{receiver.port}"
    assert 0 < await shard.client.pttl(delivery_key(job_id)) <= KEEP_MS


async def test_a_large_output_stays_behind_and_one_that_expired_is_named(shard):
    async with receiving() as receiver:
        large = await ended(shard, receiver.url(), text="x" * 20_000)
        await attempt(shard.client, large)
        gone = await ended(shard, receiver.url(), text="soon gone")
        await Records(shard.client).read(gone)
        await shard.client.delete(KEYS.output(gone))
        await attempt(shard.client, gone)
    omitted = [got.json["data"]["output_omitted"] for got in receiver.requests]
    assert omitted == ["too_large", "gone"]
    # What is kept for a week holds no output.
    for name in (large, gone):
        kept = await shard.client.hget(delivery_key(name), "data")
        assert b"soon gone" not in kept
        assert b"x" * 9 not in kept


async def test_a_job_that_failed_is_told_with_its_error(shard):
    async with receiving() as receiver:
        job_id = await shard.enqueue(webhook=receiver.url(), tenant="other")
        assert await shard.scripts.cancel(job_id) == "cancelled"
        await attempt(shard.client, job_id)
    told = receiver.requests[0].json
    assert told["type"] == "job.cancelled"
    assert told["data"]["error"]["code"] == "cancelled"
    assert told["data"]["tenant"] == "other"


@pytest.mark.parametrize("status", ["500 Oops", "503 Busy", "408 Late", "429 Slow"])
async def test_what_may_pass_is_tried_again_and_then_given_up(shard, status):
    async with receiving(status) as receiver:
        job_id = await ended(shard, receiver.url())
        waits = [await attempt(shard.client, job_id) for _ in range(3)]
        assert 2.5 <= waits[0] <= 5
        assert 10 <= waits[1] <= 20
        assert waits[2] is None
        assert len(receiver.requests) == 3
        assert len(set(receiver.ids)) == 1
    (seen,) = await deliveries(shard.client, state="given_up")
    assert (seen.attempts, seen.status) == (3, int(status[:3]))
    assert not await shard.client.zcard(OPEN)


@pytest.mark.parametrize(
    "status", ["400 Bad", "401 No", "404 None", "410 Gone", "302 Found\r\nlocation: /x"]
)
async def test_other_answers_are_final_and_redirects_are_not_followed(shard, status):
    async with receiving(status) as receiver:
        job_id = await ended(shard, receiver.url())
        assert await attempt(shard.client, job_id) is None
        assert receiver.connections == 1
    (seen,) = await deliveries(shard.client)
    assert (seen.state, seen.status) == ("given_up", int(status[:3]))


async def test_a_receiver_says_when_to_come_again(shard):
    async with receiving("503 Busy\r\nretry-after: 100") as receiver:
        job_id = await ended(shard, receiver.url())
        assert await attempt(shard.client, job_id) == 100
    (seen,) = await deliveries(shard.client)
    assert seen.next_ms - seen.changed_ms == 100_000


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("99999999", 6 * 3600.0),
        ("-1", None),
        ("soon", None),
        ("", None),
        (None, None),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 60.0),
        ("Wed, 31 Dec 1969 00:01:00 GMT", 0.0),
        ("9" * 400, None),
    ],
)
def test_retry_after_is_read_in_both_forms(value, expected):
    assert retry_after_s(value, now_s=0.0) == expected


def test_waits_grow_and_have_a_bound():
    for made, bound in ((1, 5), (2, 20), (3, 80), (7, 5 * 4**6), (20, 6 * 3600)):
        assert bound / 2 <= wait_after(made) <= bound


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "no answer within 0.3 s"),
        (b"", "what answers there does not speak HTTP"),
        (b"220 smtp ready\r\n", "what answers there does not speak HTTP"),
    ],
)
async def test_no_answer_is_tried_again(shard, answer, error):
    most_s = 0.3 if answer is None else 30.0
    config = WebhooksConfig(secret=SECRET, allow_private=True, timeout_s=most_s)
    async with receiving(answer) as receiver:
        job_id = await ended(shard, receiver.url())
        assert await attempt(shard.client, job_id, config)
    (seen,) = await deliveries(shard.client)
    assert (seen.state, seen.status, seen.error) == ("pending", None, error)


async def test_a_refused_connection_is_tried_again(shard):
    async with receiving() as receiver:
        url = receiver.url()
    job_id = await ended(shard, url)
    assert await attempt(shard.client, job_id)
    (seen,) = await deliveries(shard.client)
    assert seen.error == "it refuses connections"


async def test_an_endless_answer_is_not_read(shard):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"
    async with receiving(head + b"x" * 1_000_000) as receiver:
        job_id = await ended(shard, receiver.url())
        assert await attempt(shard.client, job_id) is None
    (seen,) = await deliveries(shard.client)
    assert seen.state == "delivered"


async def test_without_a_secret_nothing_is_sent_and_it_is_said(shard):
    async with receiving() as receiver:
        job_id = await ended(shard, receiver.url())
        plain = WebhooksConfig(allow_private=True)
        assert await attempt(shard.client, job_id, plain) is None
        assert receiver.connections == 0
    (seen,) = await deliveries(shard.client)
    assert "webhooks.secret" in (seen.error or "")


async def test_both_secrets_sign_while_receivers_change_over(shard):
    both = WebhooksConfig(
        secret=SECRET, previous_secret="the former secret", allow_private=True
    )
    async with receiving() as receiver:
        await attempt(shard.client, await ended(shard, receiver.url()), both)
    (got,) = receiver.requests
    assert verify(SECRET, got.headers, got.body)
    assert verify("the former secret", got.headers, got.body)


async def test_an_attempt_that_was_cut_off_counts(shard):
    async with receiving(None) as receiver:
        job_id = await ended(shard, receiver.url())
        for _ in range(3):
            task = asyncio.create_task(attempt(shard.client, job_id))
            await wait_until(lambda: receiver.requests, what="the request")
            receiver.requests.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await attempt(shard.client, job_id) is None
    (seen,) = await deliveries(shard.client)
    assert (seen.state, seen.attempts) == ("given_up", 3)


async def test_one_host_that_hangs_has_a_few_attempts_at_once(shard, monkeypatch):
    monkeypatch.setattr(webhook_turns, "PER_TARGET", 2)
    config = WebhooksConfig(secret=SECRET, allow_private=True, timeout_s=2.0)
    async with receiving(None) as slow, receiving() as quick:
        ids = [await ended(shard, slow.url()) for _ in range(5)]
        other = await ended(shard, quick.url())
        one, poster = deliverer(shard.client, config)
        async with poster:
            await asyncio.gather(*(one.attempt(name) for name in [*ids, other]))
        assert len(slow.requests) == 2
        assert quick.ids == [other]
    pending = await deliveries(shard.client, state="pending")
    # The others had no attempt, and lost none.
    assert sorted(seen.attempts for seen in pending) == [0, 0, 0, 1, 1]


async def test_a_job_that_goes_on_or_has_no_webhook_is_not_told(shard):
    running, _ = await shard.run(webhook="https://example.com/")
    plain = await ended(shard, None)
    for name in (running, plain, "no such job", "tiny.0.0000000000000000"):
        assert await attempt(shard.client, name) is None
    assert not await shard.client.zcard(LOG)
    # What goes on still has its webhook to come.
    assert await shard.client.zrange(KEYS.webhooks, 0, -1) == [running.encode()]


async def test_a_job_whose_record_expired_unseen_is_said_to_be_lost(shard):
    job_id = await ended(shard, "https://example.com/")
    await shard.client.delete(KEYS.job(job_id), KEYS.output(job_id))
    with structlog.testing.capture_logs() as logs:
        assert await attempt(shard.client, job_id) is None
    assert [line["event"] for line in logs] == ["webhook_lost"]
    assert not await shard.client.zcard(KEYS.webhooks)


async def test_a_requeued_or_repeated_job_keeps_its_first_webhook(shard):
    job = new_job(webhook="https://example.com/a", idempotency_key="k")
    again = new_job(webhook="https://example.com/b", idempotency_key="k")
    first, second = await shard.scripts.enqueue([job, again])
    assert (first.status, second.status) == ("queued", "duplicate")
    record = await shard.scripts.job(first.job_id)
    assert record["webhook"] == "https://example.com/a"
    assert await shard.client.zrange(KEYS.webhooks, 0, -1) == [first.job_id.encode()]
