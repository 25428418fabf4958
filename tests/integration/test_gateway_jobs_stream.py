"""Streams of /v1/jobs: every position can be gone on from, and nothing comes twice."""

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from support.fake_group import FakeGroup
from support.served import gateway_config, served
from support.waiting import wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.producer.gateway.jobs_cursor import Cursor
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.messages import Delta, FinishReason

WORDS = [f"w{i}" for i in range(30)]
TEXT = " ".join(WORDS)


@pytest.fixture
async def group(empty_redis):
    async with FakeGroup(empty_redis, delay_s=0.002) as fake:
        yield fake


@pytest.fixture
async def gateway(newest_redis, group, tmp_path):
    config = gateway_config(tmp_path, keepalive_s=0.1)
    async with served(config, newest_redis.url) as made:
        yield made


@pytest.fixture
async def quiet_gateway(newest_redis, group, tmp_path):
    """Sends no comment that could come first."""
    async with served(gateway_config(tmp_path), newest_redis.url) as made:
        yield made


@pytest.fixture
async def mill(newest_redis, group):
    async with Client(newest_redis.url) as client:
        yield client


class Event(msgspec.Struct):
    id: str | None
    kind: str
    data: dict


async def events(response) -> AsyncIterator[Event]:
    """Parses server-sent events, comments left out."""
    event_id, kind, data = None, "message", []
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        elif not line and data:
            yield Event(event_id, kind, json.loads("\n".join(data)))
            kind, data = "message", []


async def follow(gateway, job_id, last=None, most=None, **params) -> list[Event]:
    """Reads a stream to its end, or leaves after so many events."""
    found: list[Event] = []
    headers = {} if last is None else {"Last-Event-ID": last}
    async with gateway.http.stream(
        "GET", f"/v1/jobs/{job_id}/stream", headers=headers, params=params
    ) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for event in events(response):
            found.append(event)
            if len(found) == most:
                break
    return found


def texts(found: list[Event]) -> dict[int, str]:
    """Text by choice; checks that offsets have neither gap nor repeat."""
    text: dict[int, str] = {}
    following: dict[int, int] = {}
    for event in found:
        if event.kind == "end":
            continue
        delta = event.data
        choice, offset = delta.get("choice", 0), delta.get("offset", 0)
        tokens = delta.get("token_ids", [])
        assert offset == following.get(choice, 0)
        following[choice] = offset + len(tokens)
        text[choice] = text.get(choice, "") + delta.get("text", "")
    return text


async def job_of(mill, n: int = 1) -> str:
    job = await mill.submit(Prompt(TEXT, sampling=Sampling(n=n, max_tokens=64)))
    return job.id


async def test_a_stream_is_whole_and_says_how_it_ended(gateway, mill) -> None:
    found = await follow(gateway, await job_of(mill))
    assert texts(found) == {0: TEXT}
    assert found[-1].kind == "end"
    assert found[-1].data["state"] == "succeeded"
    assert found[-1].data["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("n", [1, 3])
async def test_every_event_can_be_gone_on_from(gateway, mill, n) -> None:
    """At each position: from the log, and from the result once the log is gone."""
    job_id = await job_of(mill, n)
    whole = await follow(gateway, job_id)
    assert texts(whole) == dict.fromkeys(range(n), TEXT)
    positions = [0, 1, 2, len(whole) // 2, len(whole) - 2]
    for position in positions:
        rest = await follow(gateway, job_id, whole[position].id)
        assert rest == whole[position + 1 :]

    await gateway.owner.redis.delete(gateway.owner.client.job(job_id).shard.log(job_id))
    for position in positions:
        rest = await follow(gateway, job_id, whole[position].id)
        joined = texts([*whole[: position + 1], *rest])
        assert joined == dict.fromkeys(range(n), TEXT)
        assert rest[-1].kind == "end"


async def test_a_reader_goes_on_at_another_gateway(
    gateway, mill, newest_redis, tmp_path
) -> None:
    """It leaves every few events while the job runs, and asks the other one next."""
    async with served(gateway_config(tmp_path), newest_redis.url) as other:
        job_id = await job_of(mill, 2)
        found: list[Event] = []
        gateways = [gateway, other]
        while not found or found[-1].kind != "end":
            last = found[-1].id if found else None
            found += await follow(gateways[0], job_id, last, most=5)
            gateways.reverse()
        assert texts(found) == {0: TEXT, 1: TEXT}
        state = await other.http.get(f"/v1/jobs/{job_id}")
        assert state.json()["state"] == "succeeded"


async def test_after_the_end_nothing_follows(gateway, mill) -> None:
    job_id = await job_of(mill)
    whole = await follow(gateway, job_id)
    reply = await gateway.http.get(
        f"/v1/jobs/{job_id}/stream", headers={"Last-Event-ID": whole[-1].id}
    )
    assert reply.status_code == 204


async def test_a_stream_begins_at_an_offset(gateway, mill) -> None:
    job_id = await job_of(mill)
    whole = await follow(gateway, job_id)
    part = await follow(gateway, job_id, **{"from": 12})
    first = part[0].data
    assert first["offset"] <= 12 < first["offset"] + len(first["token_ids"])
    assert part == whole[-len(part) :]


async def test_a_page_may_send_the_last_id_as_a_parameter(gateway, mill) -> None:
    job_id = await job_of(mill)
    whole = await follow(gateway, job_id)
    assert await follow(gateway, job_id, after=whole[4].id) == whole[5:]


async def test_an_id_that_is_none_of_ours_is_refused(gateway, mill) -> None:
    job_id = await job_of(mill)
    for odd in ("x", "17", "0:1", "0:1.2,", "0:1.2;end;end", "0:-1.0"):
        reply = await gateway.http.get(
            f"/v1/jobs/{job_id}/stream", headers={"Last-Event-ID": odd}
        )
        assert reply.status_code == 400, odd
        assert reply.json()["error"]["param"] == "Last-Event-ID"


async def refused(gateway, job_id, **asked) -> dict:
    """Follows a stream from where it cannot be gone on with."""
    reply = await gateway.http.get(f"/v1/jobs/{job_id}/stream", **asked)
    assert reply.status_code == 400, reply.text
    assert reply.headers["content-type"] == "application/json"
    return reply.json()["error"]


async def test_an_id_that_no_event_of_the_job_has_is_refused_at_once(
    quiet_gateway, mill, group
) -> None:
    group.delay_s = 0  # all of it is one event
    job_id = await job_of(mill)
    await mill.job(job_id).result(60)
    for last in ("0:5.14", "0:31.99", "1:3.9", "0:30.109,1:3.9"):
        error = await refused(quiet_gateway, job_id, headers={"Last-Event-ID": last})
        assert error["type"] == "invalid_request_error", last
        assert error["code"] == "invalid_request"
        assert error["param"] == "Last-Event-ID"
        assert error["message"].startswith("Last-Event-ID: nothing in the output")
    error = await refused(quiet_gateway, job_id, params={"after": "0:5.14"})
    assert error["param"] == "after"
    # From the result alone, whose events are not known any more.
    await group.redis.delete(mill.job(job_id).shard.log(job_id))
    assert len(await follow(quiet_gateway, job_id, "0:5.14")) == 2
    await refused(quiet_gateway, job_id, headers={"Last-Event-ID": "0:31.99"})


async def test_while_a_job_runs_its_streams_are_refused_or_begin_at_once(
    quiet_gateway, mill, group
) -> None:
    group.emitting.clear()
    job_id = await job_of(mill)
    url = f"/v1/jobs/{job_id}/stream"
    params = {"after": "0:3.8", "cancel_on_leave": 1}
    await refused(quiet_gateway, job_id, params=params)
    # Who was refused has not left, so nothing was cancelled.
    assert not (await mill.job(job_id).info()).cancel_requested
    begun = {"after": "0:0.0"}
    async with quiet_gateway.http.stream("GET", url, params=begun) as response:
        assert response.status_code == 200
        assert (await anext(response.aiter_lines())).startswith("retry:")
    group.emitting.set()
    assert (await mill.job(job_id).result(60)).text == TEXT


async def test_a_quiet_stream_has_comments_and_leaving_it_cancels_nothing(
    gateway, mill, group
) -> None:
    group.emitting.clear()
    job_id = await job_of(mill)
    url = f"/v1/jobs/{job_id}/stream"
    async with gateway.http.stream("GET", url) as response:
        async for line in response.aiter_lines():
            if line.startswith(":"):
                break
    group.emitting.set()
    assert (await mill.job(job_id).result(60)).text == TEXT


async def test_leaving_cancels_where_it_was_asked_for(gateway, mill, group) -> None:
    group.emitting.clear()
    job_id = await job_of(mill)
    url = f"/v1/jobs/{job_id}/stream?cancel_on_leave=1"
    async with gateway.http.stream("GET", url) as response:
        await anext(response.aiter_bytes())

    async def cancelled() -> bool:
        info = await mill.job(job_id).info()
        return info.cancel_requested or info.state == "cancelled"

    await wait_until(cancelled)
    group.emitting.set()


async def test_a_failed_job_ends_its_stream_with_the_error(
    gateway, mill, group
) -> None:
    def fail(_request):
        raise ValueError("broken on purpose")

    group.answer = fail
    found = await follow(gateway, await job_of(mill))
    assert [event.kind for event in found] == ["end"]
    assert found[0].data["state"] == "failed"
    assert "broken on purpose" in found[0].data["error"]["message"]


async def test_many_readers_share_the_connections_of_the_gateway(
    gateway, mill, group
) -> None:
    group.emitting.clear()
    job_id = await job_of(mill)
    before = len(await group.redis.client_list(_type="pubsub"))
    readers = [asyncio.create_task(follow(gateway, job_id)) for _ in range(30)]
    listener = gateway.owner.client.session.listener
    channel = group.keys.wake(job_id).encode()

    async def all_subscribed() -> bool:
        heard_by = dict(await group.redis.pubsub_numsub(channel))[channel]
        return heard_by > 0 and len(listener._watchers.get(channel, ())) == 30

    await wait_until(all_subscribed)
    assert len(await group.redis.client_list(_type="pubsub")) <= before + 1
    assert listener.num_links == 1
    group.emitting.set()
    for found in await asyncio.gather(*readers):
        assert texts(found) == {0: TEXT}


def test_a_cursor_knows_deltas_without_tokens_and_ends() -> None:
    cursor = Cursor()
    assert cursor.advance(Delta(token_ids=(1, 2), text="ab")) == "0:2.2"
    assert cursor.advance(Delta(choice=1, token_ids=(3,), text="")) == "0:2.2,1:1.0"
    assert cursor.advance(Delta(offset=2, text="c")) == "0:2.3.1,1:1.0"
    last = Delta(offset=2, text="", finish_reason=FinishReason.STOP)
    assert cursor.advance(last) == "0:2.3.2!,1:1.0"
    again = Cursor.parse(cursor.end())
    assert again.ended
    assert again.positions == cursor.positions
    with pytest.raises(InvalidRequest):
        Cursor.parse("0:1.1," * 1000)
    with pytest.raises(InvalidRequest, match="after: 'garbage'"):
        Cursor.parse("garbage", "after")
