"""Streams over HTTP: who leaves, who is slow, who stays when the gateway goes."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from support.fake_group import FakeGroup
from support.served import Served, gateway_config, served
from support.waiting import wait_until

from tokenmill.producer.gateway import connections
from tokenmill.producer.gateway.app import create_app
from tokenmill.producer.gateway.server import make_server
from tokenmill.shared.messages import DEFAULT_MODEL

LONG = " ".join(map(str, range(5000)))
COMPLETIONS = "/v1/completions"


def asked(text: str = LONG, **fields: object) -> dict[str, object]:
    return {"model": DEFAULT_MODEL, "prompt": text, "max_tokens": 5000, **fields}


@pytest.fixture
async def group(empty_redis):
    async with FakeGroup(empty_redis, delay_s=0.005) as fake:
        yield fake


@pytest.fixture
async def gateway(newest_redis, group, tmp_path):
    async with served(gateway_config(tmp_path), newest_redis.url) as made:
        yield made


async def state_of(gateway: Served, job_id: str) -> str:
    return (await gateway.owner.client.job(job_id).info()).state


async def ends_as(gateway: Served, job_id: str, state: str) -> None:
    async def ended() -> bool:
        return await state_of(gateway, job_id) == state

    await wait_until(ended, what=f"{job_id} {state}")


async def events(response: httpx.Response) -> AsyncIterator[dict[str, object]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


# --- clients that leave ---------------------------------------------------------------
async def test_leaving_a_stream_cancels_its_job(gateway, group) -> None:
    body = asked(stream=True)
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        job_id = response.headers["x-tokenmill-job"]
        await anext(events(response))
    await ends_as(gateway, job_id, "cancelled")
    await wait_until(lambda: group.num_finished == 1)  # its worker let go of it


async def test_leaving_while_waiting_cancels_the_job(gateway, group) -> None:
    waiting = asyncio.create_task(gateway.http.post(COMPLETIONS, json=asked()))
    await wait_until(lambda: group.num_started == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    (job,) = await gateway.owner.client.jobs()
    await ends_as(gateway, job.id, "cancelled")


async def test_leaving_cancels_all_jobs_of_a_request(gateway, group) -> None:
    body = asked([LONG, LONG, LONG], stream=True)
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        await anext(events(response))
    jobs = await gateway.owner.client.jobs()
    assert len(jobs) == 3
    for job in jobs:
        await ends_as(gateway, job.id, "cancelled")


@pytest.mark.parametrize(
    "headers", [{"X-Tokenmill-Keep-On-Disconnect": "1"}, {"Idempotency-Key": "back"}]
)
async def test_a_job_can_be_kept(gateway, headers: dict[str, str]) -> None:
    body = asked("a b c d e f g h", stream=True)
    async with gateway.http.stream(
        "POST", COMPLETIONS, json=body, headers=headers
    ) as response:
        job_id = response.headers["x-tokenmill-job"]
        await anext(events(response))
    await ends_as(gateway, job_id, "succeeded")
    assert (await gateway.owner.client.job(job_id).result()).text == "a b c d e f g h"


# --- what a stream says ---------------------------------------------------------------
async def test_a_job_that_fails_at_once_has_a_status_of_its_own(gateway, group) -> None:
    def fails(request) -> list[str]:
        raise ValueError("the engine is out of order")

    group.answer = fails
    reply = await gateway.http.post(COMPLETIONS, json=asked("x", stream=True))
    assert reply.status_code == 500
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["code"] == "engine_error"


async def test_an_error_in_its_midst_is_the_last_event(gateway, group) -> None:
    body = asked(stream=True)
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        job_id = response.headers["x-tokenmill-job"]
        found = events(response)
        await anext(found)
        await gateway.owner.client.job(job_id).cancel()
        last = [event async for event in found][-1]
    assert last["error"]["code"] == "job_cancelled"


async def test_a_stream_without_news_is_kept_alive(
    newest_redis, group, tmp_path
) -> None:
    group.emitting.clear()
    config = gateway_config(tmp_path, keepalive_s=0.1)
    async with served(config, newest_redis.url) as gateway:
        body = asked("a b", stream=True)
        async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            group.emitting.set()
            rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_a_request_has_a_time(newest_redis, group, tmp_path) -> None:
    group.emitting.clear()
    config = gateway_config(tmp_path, request_timeout_s=1, keepalive_s=0.2)
    async with served(config, newest_redis.url) as gateway:
        whole, streamed = await asyncio.gather(
            gateway.http.post(COMPLETIONS, json=asked("a b")),
            gateway.http.post(COMPLETIONS, json=asked("a b", stream=True)),
        )
        group.emitting.set()
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "request_timeout"
        assert '"code":"request_timeout"' in streamed.text
        for job in await gateway.owner.client.jobs():
            await ends_as(gateway, job.id, "cancelled")


# --- clients that are slow ------------------------------------------------------------
async def test_a_client_that_takes_nothing_is_cut_off(
    newest_redis, empty_redis, tmp_path
) -> None:
    async with FakeGroup(empty_redis, delay_s=0.0005) as group:
        group.answer = lambda _: ["x" * 40_000] * 4000
        config = gateway_config(tmp_path, slow_client_s=0.5, keepalive_s=0.2)
        async with served(config, newest_redis.url) as gateway:
            port = int(gateway.url.rsplit(":", 1)[1].strip("/"))
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            body = json.dumps(asked("x", stream=True)).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await wait_until(lambda: group.num_started == 1)
            (job,) = await gateway.owner.client.jobs()
            await ends_as(gateway, job.id, "cancelled")
            writer.transport.abort()


async def test_a_connection_without_a_request_is_closed(
    newest_redis, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that says nothing nor one whose header never ends is kept."""
    monkeypatch.setattr(connections, "LOOK_S", 0.2)
    config = gateway_config(tmp_path)
    server = make_server(create_app(config, newest_redis.url), config.gateway)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        await wait_until(lambda: server.started)
        address = listening.getsockname()
        silent, quiet = await asyncio.open_connection(*address)
        dripping, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: ")
        async with asyncio.timeout(60):
            for reader in (silent, dripping):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        for one in (quiet, writer):
            one.transport.abort()
        server.should_exit = True
        await serving


# --- the gateway's end ----------------------------------------------------------------
async def test_streams_that_outlast_the_drain_end_with_an_error(gateway, group) -> None:
    body = asked(stream=True)
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        found = events(response)
        await anext(found)
        waiting = asyncio.create_task(gateway.http.post(COMPLETIONS, json=asked()))
        await wait_until(lambda: group.num_started == 2)
        draining = asyncio.create_task(gateway.owner.drain())
        refused = await gateway.http.post(COMPLETIONS, json=asked("a"))
        last = [event async for event in found][-1]
        await draining
    assert last["error"]["code"] == "shutting_down"
    for reply in (refused, await waiting):
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
    for job in await gateway.owner.client.jobs():
        await ends_as(gateway, job.id, "cancelled")


async def test_streams_that_end_in_time_end_well(newest_redis, group, tmp_path) -> None:
    config = gateway_config(tmp_path, drain_s=10)
    async with served(config, newest_redis.url) as gateway:
        body = asked("a b c d", stream=True)
        async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
            found = response.aiter_lines()
            await anext(found)
            draining = asyncio.create_task(gateway.owner.drain())
            lines = [line async for line in found]
        draining.cancel()
    assert lines[-2:] == ["data: [DONE]", ""]
