"""Jobs with a webhook from submit on: facts, records, commands, what doctor says."""

import asyncio
import json

import pytest
import redis.asyncio
from support.shard_client import KEYS, Shard, new_job
from typer.testing import CliRunner

from tokenmill import Client, Prompt
from tokenmill.__main__ import build_app
from tokenmill.shared.config import Config, WebhooksConfig
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.keys import MODELS, POOL, lane_of
from tokenmill.shared.messages import ModelCard, PoolCard, encode
from tokenmill.shared.pool.webhook_check import examine_accounts
from tokenmill.shared.script_sources import load_script
from tokenmill.shared.webhook_keys import LOG, OPEN, delivery_key

URL = "https://example.com/hook?token=abc"
SECRET = "a secret of sixteen"
CARD = ModelCard(
    model="tiny",
    max_context=2048,
    vocab_size=257,
    tokenizer="bytes",
    has_chat_template=True,
    weights_version="w",
)


@pytest.fixture
async def shard(redis_client):
    return await Shard(redis_client).open("g1")


async def raw(shard, webhook, *extra):
    """enqueue as a client of another language calls it."""
    job_id = str(new_job().id)
    head = ("load", "lanes", "recent", "deadline", "delayed", "bell", "limits", "rates")
    keys = [KEYS.prefix + name for name in head]
    lane = lane_of("default")
    keys += [KEYS.job(job_id), KEYS.input(job_id)]
    keys += [KEYS.queue("interactive", "128", lane), KEYS.job(job_id), *extra]
    facts = {"id": job_id, "hash": "h", "bucket": "128", "lane": lane}
    facts |= {"tokens": 1, "max_tokens": 1, "seed": "1", "webhook": webhook}
    source = load_script("enqueue").source
    args = [1, json.dumps(facts), '{"text":"x"}']
    reply = await shard.client.eval(source, len(keys), *keys, *args)
    return reply[0].decode(), reply[1].decode(), reply[3].decode()


async def test_the_record_holds_the_address_and_the_shard_remembers_it(shard):
    status, job_id, _ = await raw(shard, URL, KEYS.webhooks)
    assert status == "queued"
    assert (await shard.scripts.job(job_id))["webhook"] == URL
    assert await shard.client.zrange(KEYS.webhooks, 0, -1) == [job_id.encode()]
    assert await shard.scripts.cancel(job_id) == "cancelled"
    ((_, event),) = await shard.client.xrange(KEYS.done)
    assert event[b"webhook"] == b"1"


@pytest.mark.parametrize(
    "webhook", ["ftp://x", "x", "https://", "https://a b", "https://" + "x" * 2048, 5]
)
async def test_what_is_no_address_is_refused_by_name(shard, webhook):
    status, _, detail = await raw(shard, webhook, KEYS.webhooks)
    assert (status, detail[:9]) == ("invalid", "webhook: ")
    assert not await shard.client.exists(KEYS.recent, KEYS.webhooks)


async def test_the_key_is_needed_for_a_webhook_and_harmless_without(shard):
    for extra in ((), ("tm:{tiny:0}:other",)):
        status, _, detail = await raw(shard, URL, *extra)
        assert (status, detail) == (
            "invalid",
            "keys: expected webhooks of this shard after those of the jobs",
        )
    for webhook in (None, ""):
        assert (await raw(shard, webhook, KEYS.webhooks))[0] == "queued"
        assert (await raw(shard, webhook))[0] == "queued"
    assert not await shard.client.exists(KEYS.webhooks)


async def test_a_job_without_one_has_an_event_without_one(shard):
    await shard.scripts.cancel(await shard.enqueue())
    ((_, event),) = await shard.client.xrange(KEYS.done)
    assert b"webhook" not in event


@pytest.fixture
async def client(newest_redis):
    client = redis.asyncio.Redis.from_url(newest_redis.url)
    await client.flushall()
    await client.hset(MODELS, "tiny", encode(CARD))
    yield client
    await client.aclose()


async def test_a_pool_without_a_secret_refuses_at_submit(client, newest_redis):
    prompt = Prompt("x", model="tiny", webhook=URL)
    cards = (PoolCard(), PoolCard(webhooks="public"))
    for card, is_taken in zip(cards, (False, True), strict=True):
        await client.set(POOL, encode(card))
        async with Client(newest_redis.url) as mill:
            if is_taken:
                job = await mill.submit(prompt, when_unserved="wait")
            else:
                with pytest.raises(InvalidRequest, match=r"webhooks\.secret"):
                    await mill.submit(prompt, when_unserved="wait")
    assert await client.hget(KEYS.job(job.id), "webhook") == URL.encode()


async def findings(client, **hooks):
    config = Config(webhooks=WebhooksConfig(**hooks))
    raw_card = await client.get(POOL)
    card = PoolCard(webhooks="public") if raw_card else None
    found = await examine_accounts(client, card, config, ["tiny:0"])
    return {one.name: one for one in found}


async def test_doctor_names_what_is_wrong_with_webhooks_and_usage(client):
    found = await findings(client)
    assert all(one.severity == "info" for one in found.values())
    assert "no secret" in found["webhooks"].message
    await client.zadd(KEYS.webhooks, {"job": 1})
    assert "1 jobs have a webhook" in (await findings(client))["webhooks"].message
    assert "1 jobs wait" in (await findings(client, secret=SECRET))["webhooks"].message
    await client.set(POOL, b"{}")
    elsewhere = (await findings(client))["webhooks"]  # as a producer's settings are
    assert elsewhere.severity == "info"
    assert "schedulers and the janitor alone need" in elsewhere.message
    other = (await findings(client, secret=SECRET, allow_private=True))["webhooks"]
    assert (other.severity, "'public'" in other.message) == ("warning", True)
    await client.zadd(OPEN, {"event": 1})
    late = (await findings(client, secret=SECRET))["webhooks late"]
    assert "1 deliveries are overdue" in late.message
    assert "janitor" in late.cure
    await note(client, "event", "given_up")
    given_up = (await findings(client, secret=SECRET))["webhooks given up"]
    assert "https://example.com: answered 404" in given_up.message
    assert "token" not in given_up.message
    await client.set(KEYS.usage, "x")
    assert (await findings(client))["usage tiny:0"].severity == "warning"


async def note(client, event_id, state):
    """A delivery as the janitor leaves it."""
    record = {"url": URL, "type": "job.failed", "data": "{}", "state": state}
    record |= {"attempts": 1, "status": 404, "error": "answered 404", "tenant": "acme"}
    await client.hset(delivery_key(event_id), mapping=record)
    await client.zadd(LOG, {event_id: 5})


async def test_commands_list_and_redeliver(client, newest_redis):
    for number in range(3):
        await note(client, f"e{number}", ("given_up", "delivered")[number % 2])
    # Commands run a loop of their own.
    list_ok, as_json, again, wrong, state = await asyncio.to_thread(
        commands,
        newest_redis.url,
        ["list"],
        ["list", "--json", "--state", "given_up", "--tenant", "acme"],
        ["redeliver", "--failed"],
        ["redeliver"],
        ["list", "--state", "odd"],
    )
    assert list_ok.exit_code == 0
    assert "token" not in list_ok.output
    assert "https://example.com" in list_ok.output
    seen = [json.loads(line) for line in as_json.output.splitlines()]
    assert {one["id"] for one in seen} == {"e0", "e2"}
    assert "2 webhooks" in again.output
    asked = [f[b"id"] for _, f in await client.xrange("tm:webhooks")]
    assert sorted(asked) == [b"e0", b"e2"]
    assert (wrong.exit_code, state.exit_code) == (2, 2)


def commands(url, *calls):
    runner = CliRunner()
    return [
        runner.invoke(build_app(), ["webhooks", *call, "--url", url]) for call in calls
    ]


async def test_the_option_of_submit_is_the_job_s_webhook(client, newest_redis):
    await client.set(POOL, encode(PoolCard(webhooks="public")))
    call = ["submit", "x", "--model", "tiny", "--no-wait", "--wait-for-worker"]
    call += ["--url", newest_redis.url, "--webhook"]

    def run(url):
        return CliRunner().invoke(build_app(), [*call, url])

    good, bad = [await asyncio.to_thread(run, url) for url in (URL, "http://10.0.0.1/")]
    assert good.exit_code == 0, good.output
    job_id = good.output.split()[-1]
    assert await client.hget(KEYS.job(job_id), "webhook") == URL.encode()
    assert bad.exit_code == 4
