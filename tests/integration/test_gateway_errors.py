"""Errors over HTTP: OpenAI's form, the right status, and when to try again."""

import asyncio
import json
import time

import httpx
import openai
import pytest
import structlog
from support.openai_clients import async_client
from support.served import Served, gateway_config, served
from support.waiting import wait_until

from tokenmill import Prompt
from tokenmill.producer.gateway import limits
from tokenmill.shared.messages import DEFAULT_MODEL
from tokenmill.shared.metrics.catalog import HTTP_OPEN

COMPLETIONS = "/v1/completions"
BODY = {"model": DEFAULT_MODEL, "prompt": "a b c"}


@pytest.fixture
async def gateway(newest_redis, group, tmp_path):
    config = gateway_config(tmp_path, max_body_bytes=2048)
    async with served(config, newest_redis.url) as made:
        yield made


def error_of(reply: httpx.Response) -> dict[str, str | None]:
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("GET", "/v1/models/org/none", 404, "model_not_found"),
        ("GET", "/v1/jobs/m.0.0123456789abcdef", 404, "unknown_job"),
        ("GET", "/v1/jobs?limit=0", 400, "invalid_request"),
    ],
)
async def test_what_is_not_there_says_so(
    gateway: Served, method: str, path: str, status: int, code: str
) -> None:
    reply = await gateway.http.request(method, path)
    assert reply.status_code == status
    assert error_of(reply)["code"] == code


async def test_a_parameter_that_is_wrong_is_named(gateway: Served) -> None:
    reply = await gateway.http.get("/v1/jobs?limit=0")
    assert error_of(reply)["param"] == "limit"


async def test_limits_of_the_pool_are_named_as_the_caller_knows_them(
    gateway: Served,
) -> None:
    body = {**BODY, "max_tokens": 10_000}
    reply = await gateway.http.post(COMPLETIONS, json=body)
    error = error_of(reply)
    assert (reply.status_code, error["param"]) == (400, "max_tokens")
    assert error["message"].startswith("max_tokens: 10000 is out of range")

    reply = await gateway.http.post(COMPLETIONS, json={**BODY, "prompt": ["a", ""]})
    assert error_of(reply)["param"] == "prompt[1]"
    assert await gateway.owner.client.jobs() == []  # all of them or none


# --- size and speed -------------------------------------------------------------------
async def test_a_body_that_is_too_large_is_refused_by_its_length(
    gateway: Served,
) -> None:
    reply = await gateway.http.post(COMPLETIONS, json={**BODY, "prompt": "x" * 4000})
    assert reply.status_code == 413
    assert error_of(reply)["code"] == "payload_too_large"


@pytest.mark.parametrize(
    "head",
    [
        f"Content-Length: {4 * 2**20}\r\n\r\n",
        f"Transfer-Encoding: chunked\r\n\r\n{4 * 2**20:x}\r\n",
        f"Content-Encoding: gzip\r\nContent-Length: {4 * 2**20}\r\n\r\n",
    ],
    ids=["length", "chunked", "encoded"],
)
async def test_who_sends_all_of_it_all_the_same_reads_why_it_was_refused(
    gateway: Served, head: str
) -> None:
    port = int(gateway.url.rsplit(":", 1)[1].strip("/"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}".encode())
    writer.write(b" " * 4 * 2**20)
    if "chunked" in head:
        writer.write(b"\r\n0\r\n\r\n")
    await writer.drain()
    async with asyncio.timeout(60):
        answer = await reader.read()  # to the end: a connection that is reset has none
    writer.close()
    assert answer.split()[1] in (b"413", b"415")
    assert b'"code":' in answer


async def test_it_is_refused_before_all_of_it_is_read(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LINGER_BYTES", 1024 * 1024)
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1024
            yield b" " * 1024

    try:
        status = (await gateway.http.post(COMPLETIONS, content=endless())).status_code
    except httpx.TransportError:
        status = 413  # it was cut off while it still sent, and read no answer
    assert status == 413
    assert sent < 64 * 1024 * 1024


async def test_a_body_that_does_not_come_is_not_waited_for(
    newest_redis, group, tmp_path
) -> None:
    config = gateway_config(tmp_path, slow_client_s=0.3)
    async with served(config, newest_redis.url) as gateway:
        port = int(gateway.url.rsplit(":", 1)[1].strip("/"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n")
        writer.close()
    assert b" 408 " in head


async def test_a_client_that_leaves_in_its_body_is_no_fault_of_ours(
    newest_redis, group, tmp_path
) -> None:
    async with served(gateway_config(tmp_path), newest_redis.url) as gateway:
        port = int(gateway.url.rsplit(":", 1)[1].strip("/"))
        lines = await _left_in_its_body(port)
    (line,) = [one for one in lines if one["event"] != "metrics_served"]
    assert (line["status"], line["ended"]) == (499, "client_left")


async def _left_in_its_body(port: int) -> list[dict[str, object]]:
    """What was logged meanwhile."""
    with structlog.testing.capture_logs() as lines:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        await writer.drain()
        await wait_until(lambda: HTTP_OPEN.values.get((), 0) >= 1)
        writer.transport.abort()
        await wait_until(lambda: any(one["event"] == "http_request" for one in lines))
    return list(lines)


async def test_more_requests_than_allowed_are_turned_away(
    newest_redis, group, tmp_path
) -> None:
    config = gateway_config(tmp_path, max_requests=1)
    async with served(config, newest_redis.url) as gateway:
        await group.pause()
        waiting = asyncio.create_task(gateway.http.post(COMPLETIONS, json=BODY))
        await wait_until(gateway.owner.client.jobs)
        reply = await gateway.http.get("/v1/models")
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        group.serving.set()
        assert (await waiting).status_code == 200


# --- backpressure ---------------------------------------------------------------------
async def test_a_model_without_a_worker_is_worth_another_try(
    gateway: Served, group
) -> None:
    await group.leave()
    reply = await gateway.http.post(COMPLETIONS, json=BODY)
    error = error_of(reply)
    assert (reply.status_code, error["code"]) == (503, "model_unavailable")
    assert int(reply.headers["retry-after"]) >= 1
    assert "when_unserved" not in error["message"]  # that is for Python


async def test_the_official_client_waits_as_long_as_it_is_told(
    gateway: Served, group, empty_redis
) -> None:
    """A full queue answers 429 with Retry-After, which the client's retries honour."""
    await empty_redis.hset(group.keys.limits, "max_waiting_jobs", 1)
    await group.pause()
    await gateway.owner.client.submit(Prompt("waits"))
    times: list[float] = []
    told: list[int] = []

    async def note(response: httpx.Response) -> None:
        times.append(time.monotonic())
        if response.status_code == 429:
            told.append(int(response.headers["retry-after"]))
            group.serving.set()

    http = httpx.AsyncClient(event_hooks={"response": [note]})
    async with async_client(gateway.url.rstrip("/"), http_client=http) as client:
        with pytest.raises(openai.RateLimitError) as full:
            await client.with_options(max_retries=0).completions.create(**BODY)
        assert full.value.code == "queue_full"
        await wait_until(lambda: group.num_finished == 1)
        await group.pause()
        await gateway.owner.client.submit(Prompt("waits"), when_full="wait", wait_s=60)
        del times[:], told[:]
        found = await client.with_options(max_retries=3).completions.create(**BODY)
    assert found.choices[0].text == "a b c"
    assert times[1] - times[0] >= told[0] * 0.9


# --- what is told of a request --------------------------------------------------------
async def test_a_request_leaves_one_line_without_what_was_said(
    gateway: Served,
) -> None:
    with structlog.testing.capture_logs() as lines:
        reply = await gateway.http.post(
            COMPLETIONS,
            json={**BODY, "prompt": "classified"},
            headers={"Authorization": "Bearer tm-classified", "X-Request-Id": "mine-1"},
        )
    assert reply.headers["x-request-id"] == "mine-1"
    (line,) = [one for one in lines if one["event"] == "http_request"]
    assert line["request"] == "mine-1"
    assert (line["method"], line["route"]) == ("POST", COMPLETIONS)
    assert (line["status"], line["tenant"]) == (200, "default")
    assert line["jobs"] == [reply.headers["x-tokenmill-job"]]
    assert "classified" not in json.dumps(lines)


async def test_an_error_of_ours_is_a_500_that_hides_its_cause(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("a secret of the process")

    monkeypatch.setattr(gateway.owner.client, "models", fails)
    with structlog.testing.capture_logs() as lines:
        reply = await gateway.http.get("/v1/models")
    assert reply.status_code == 500
    assert error_of(reply)["code"] == "internal_error"
    assert "secret" not in reply.text
    assert any(one["event"] == "unexpected_error" for one in lines)
