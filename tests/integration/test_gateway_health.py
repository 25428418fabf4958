"""/healthz tells of progress, /readyz of use; neither asks for a key."""

import asyncio
import signal
import time

import httpx
import pytest
from support.commands import CommandPool
from support.served import Served, gateway_config, served
from support.servers import SERVERS, running
from support.waiting import Delay, wait_until

from tokenmill import Prompt
from tokenmill.producer.cli_gateway import check_gateway
from tokenmill.producer.gateway import progress
from tokenmill.shared.api_keys import KeyStore, Scope
from tokenmill.shared.config import Config, GatewayConfig
from tokenmill.shared.messages import DEFAULT_MODEL
from tokenmill.shared.pool.doctor import examine


@pytest.fixture(autouse=True)
def believe_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BELIEVED_S", 0.0)


@pytest.fixture
async def gateway(newest_redis, group, tmp_path):
    config = gateway_config(tmp_path, stalled_s=1)
    async with served(config, newest_redis.url) as made:
        yield made


async def problems(gateway: Served, path: str = "/healthz") -> list[str]:
    reply = await gateway.http.get(path)
    body = reply.json()
    well = reply.status_code == 200
    assert well == (body["status"] == "ok") == (body["problems"] == [])
    return body["problems"]


async def test_a_pool_at_work_is_well(gateway: Served) -> None:
    await (await gateway.owner.client.submit("hello")).result(60)
    assert await problems(gateway) == []
    assert await problems(gateway, "/readyz") == []


async def test_jobs_that_wait_beside_room_are_no_progress(
    gateway: Served, group
) -> None:
    """Every process lives and answers; nothing is given out."""
    await group.pause()
    began = time.monotonic()
    job = await gateway.owner.client.submit("hello")
    said = await problems(gateway)
    assert said == [] or time.monotonic() - began > 1  # it has not waited for long

    async def stalled() -> list[str]:
        return await problems(gateway)

    (problem,) = await wait_until(stalled, what="the stall")
    assert "a job waits" in problem
    assert "its scheduler holds the lease" in problem
    await group.scripts.release_scheduler(group.name)
    (problem,) = await problems(gateway)
    assert "no scheduler is active" in problem
    assert await problems(gateway, "/readyz") == []  # what comes is still queued

    group.serving.set()
    await job.result(60)
    assert await problems(gateway) == []


async def test_jobs_that_wait_for_room_are_no_stall(
    gateway: Served, group, empty_redis
) -> None:
    await group.pause()
    await gateway.owner.client.submit("hello")
    key = group.keys.group(group.name)
    await empty_redis.hset(key, "credit_running", 1)
    waited = asyncio.get_running_loop().time() + 1.3
    await wait_until(lambda: asyncio.get_running_loop().time() > waited)
    assert await problems(gateway) == []
    await empty_redis.hset(key, "credit_running", 1_000_000)
    assert len(await problems(gateway)) == 1


async def test_jobs_for_later_are_no_stall(gateway: Served, group) -> None:
    await gateway.owner.client.submit(Prompt("later", delay_s=60))
    waited = asyncio.get_running_loop().time() + 1.2
    await wait_until(lambda: asyncio.get_running_loop().time() > waited)
    assert await problems(gateway) == []


async def test_without_a_worker_it_is_not_ready(gateway: Served, group) -> None:
    await group.leave()
    assert "no worker lives" in (await problems(gateway, "/readyz"))[0]
    assert await problems(gateway) == []


async def test_jobs_that_wait_and_no_worker_lives_are_no_progress(
    gateway: Served, group
) -> None:
    await group.pause()
    await gateway.owner.client.submit("hello")
    await group.leave()

    async def stalled() -> list[str]:
        return await problems(gateway)

    (problem,) = await wait_until(stalled, what="the stall")
    assert "no worker that serves its model lives" in problem


async def test_a_redis_that_refuses_writes_is_not_well(
    gateway: Served, empty_redis
) -> None:
    await empty_redis.config_set("maxmemory", 1)
    try:
        (problem,) = await problems(gateway)
    finally:
        await empty_redis.config_set("maxmemory", 0)
    assert "refuses writes" in problem
    assert await problems(gateway) == []
    assert not await empty_redis.exists("tm:process:gateway:probe")


async def test_a_gateway_that_is_to_go_is_not_ready(gateway: Served) -> None:
    gateway.owner.draining.set()
    assert "going down" in (await problems(gateway, "/readyz"))[0]


async def test_balancers_hear_of_the_end_while_all_is_served_still(
    newest_redis, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = CommandPool(newest_redis.url, group)
    monkeypatch.setenv("TOKENMILL_GATEWAY_UNREADY_S", "60")
    process = await pool.start("gateway", "--port", "0")
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().split()[1]
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:

        async def is_unready() -> bool:
            return (await http.get("/readyz")).status_code == 503

        assert not await is_unready()
        process.send_signal(signal.SIGTERM)
        await wait_until(is_unready, what="word of the end")
    async with httpx.AsyncClient(base_url=address, timeout=60) as new:
        body = {"model": DEFAULT_MODEL, "prompt": "a b"}
        assert (await new.post("/v1/completions", json=body)).status_code == 200
    process.send_signal(signal.SIGTERM)  # once more: at once
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_probes_may_ask_for_the_head_alone(gateway: Served) -> None:
    for path in ("/healthz", "/readyz"):
        reply = await gateway.http.head(path)
        assert (reply.status_code, reply.content) == (200, b"")


async def test_probes_ask_for_no_key(gateway: Served, empty_redis) -> None:
    await KeyStore(empty_redis).create("acme", [Scope.ADMIN])
    assert (await gateway.http.get("/v1/models")).status_code == 401
    assert await problems(gateway) == []


async def test_a_redis_that_is_gone_is_told_in_time(tmp_path) -> None:
    with running(SERVERS[-1]) as server:
        async with served(gateway_config(tmp_path), server.url) as gateway:
            server.process.kill()
            server.process.wait()
            for path in ("/healthz", "/readyz"):
                began = time.monotonic()
                async with Delay() as delay:
                    assert "Redis" in (await problems(gateway, path))[0]
                most_s = progress.ANSWER_S + 2 + delay.allowance_s
                assert time.monotonic() - began < most_s


def test_doctor_says_whom_it_lets_in() -> None:
    (found,) = check_gateway(Config())
    assert (found.severity, found.name) == ("info", "gateway")
    assert "127.0.0.1:8080" in found.message
    (found,) = check_gateway(Config(gateway=GatewayConfig(host="0.0.0.0", auth="none")))
    assert found.severity == "warning"
    assert "keys create" in found.cure


def test_doctor_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (found,) = check_gateway(Config())
    assert "tokenmill[gateway]" in found.message


async def test_doctor_counts_the_keys(newest_redis, group, empty_redis) -> None:
    async def told() -> str:
        findings = await examine(Config(), newest_redis.url)
        return next(one.message for one in findings if one.name == "api-keys")

    assert await told() == "0 in use, 0 revoked; a gateway on this host asks for none"
    store = KeyStore(empty_redis)
    _, record = await store.create("acme", [Scope.READ])
    await store.create("acme", [Scope.READ])
    await store.revoke(record.id)
    assert await told() == "1 in use, 1 revoked"
