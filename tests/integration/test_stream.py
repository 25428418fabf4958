"""Streams: from the start, from an offset, late, slow, broken, left early."""

import asyncio

import pytest
import redis.asyncio
from support.fake_group import FakeGroup
from support.waiting import loop_turns, wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.producer import inbox, stream
from tokenmill.producer.assembler import Position
from tokenmill.shared.errors import (
    InvalidRequest,
    JobCancelled,
    JobFailed,
    UnknownJob,
)
from tokenmill.shared.messages import DEFAULT_MODEL

WORDS = [f"w{i}" for i in range(40)]
TEXT = " ".join(WORDS)


@pytest.fixture
async def mill(redis_server, redis_client):
    async with Client(redis_server.url, patience_s=5) as client:
        yield client


@pytest.fixture
async def group(redis_client):
    async with FakeGroup(redis_client, delay_s=0.002) as fake:
        yield fake


async def text_of(tokens) -> str:
    return "".join([delta.text async for delta in tokens])


def offsets_are_gapless(deltas) -> bool:
    following: dict[int, int] = {}
    for delta in deltas:
        if delta.offset != following.get(delta.choice, 0):
            return False
        following[delta.choice] = delta.offset + len(delta.token_ids)
    return True


async def test_deltas_come_in_order_and_the_end_says_how(mill, group) -> None:
    job = await mill.submit(TEXT)
    tokens = job.stream()
    deltas = [delta async for delta in tokens]
    assert "".join(d.text for d in deltas) == TEXT
    assert offsets_are_gapless(deltas)
    assert len(deltas) == 40
    assert tokens.end is not None
    assert tokens.end.state == "succeeded"
    assert tokens.end.usage.completion_tokens == 40
    with pytest.raises(StopAsyncIteration):
        await anext(tokens)


async def test_the_first_delta_arrives_while_the_job_runs(mill, group) -> None:
    job = await mill.submit(TEXT)
    async with job.stream() as tokens:
        await anext(tokens)
        assert not await job.done()


async def test_subscribers_of_any_kind_hear_the_same(mill, group, redis_server) -> None:
    job = await mill.submit(TEXT)
    live = [asyncio.ensure_future(text_of(job.stream())) for _ in range(10)]
    await wait_until(lambda: group.num_started)
    async with Client(redis_server.url) as other:
        late = asyncio.ensure_future(text_of(other.job(job.id).stream()))
        assert set(await asyncio.gather(*live, late)) == {TEXT}
        assert await text_of(other.job(job.id).stream()) == TEXT


async def test_the_log_before_the_subscription_is_not_lost(mill, group) -> None:
    job = await mill.submit("a b c d e f")
    tokens = job.stream()
    await anext(tokens)
    group.emitting.clear()
    late = job.stream()
    first = await anext(late)
    group.emitting.set()
    assert first.text + await text_of(late) == "a b c d e f"
    assert await text_of(tokens) == " b c d e f"


async def test_a_position_of_another_job_is_refused(mill, group) -> None:
    job = await mill.submit(TEXT)
    await job.result(30)
    stream = job.stream(positions={0: Position(num_tokens=99)})
    with pytest.raises(InvalidRequest, match="token 99 of choice 0"):
        await stream.begin()
    assert [delta async for delta in stream] == []
    half = job.stream(positions={0: Position(num_tokens=20)})
    await half.begin()
    assert (await text_of(half)).split() == WORDS[20:]


async def test_a_follower_resumes_at_its_offset(mill, group) -> None:
    job = await mill.submit(TEXT)
    first = []
    async for delta in job.stream():
        first.append(delta)
        if len(first) == 7:
            break
    at = first[-1].offset + len(first[-1].token_ids)
    rest = [delta async for delta in job.stream(from_offset=at)]
    assert rest[0].offset == at
    assert "".join(d.text for d in [*first, *rest]) == TEXT
    assert [d async for d in job.stream(from_offset=10_000)] == []


async def test_every_choice_is_streamed(mill, group) -> None:
    job = await mill.submit(Prompt("a b c", sampling=Sampling(n=3)))
    deltas = [delta async for delta in job.stream(from_offset=1)]
    for choice in range(3):
        assert "".join(d.text for d in deltas if d.choice == choice) == " b c"


async def test_a_takeover_is_seamless(mill, redis_client) -> None:
    async with FakeGroup(redis_client, delay_s=0.005) as first:
        job = await mill.submit(TEXT)
        following = asyncio.ensure_future(text_of(job.stream()))
        await wait_until(lambda: redis_client.xlen(job.shard.log(job.id)))
        await first.die()
        await first.scripts.forfeit(first.name)
        fence = await first.scripts.acquire_scheduler(first.name, 60_000)
        report = await first.scripts.reap(fence=fence, limit=10)
        assert report.redelivered == 1
        await first.scripts.release_scheduler(first.name)
    async with FakeGroup(redis_client, delay_s=0.005):
        assert await asyncio.wait_for(following, 60) == TEXT
    entries = await redis_client.xrange(job.shard.log(job.id))
    assert any(b"d" not in fields for _, fields in entries), "no fence was written"
    assert (await job.result(60)).text == TEXT


async def test_a_broken_subscription_is_made_good(mill, group, redis_client) -> None:
    job = await mill.submit(TEXT)
    heard = []
    async for delta in job.stream():
        heard.append(delta)
        if len(heard) in (3, 10, 20):
            await redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert "".join(d.text for d in heard) == TEXT
    assert offsets_are_gapless(heard)
    assert mill._session.listener.num_links > 1


async def test_lost_messages_are_read_from_the_log(
    mill, group, redis_client, monkeypatch
) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 0.1)
    job = await mill.submit(TEXT)
    tokens = job.stream()
    heard = [await anext(tokens)]
    deliver = tokens._inbox.deliver
    count = 0

    def lossy(channel, data):
        nonlocal count
        count += 1
        if count % 3 and b'"end"' not in data:
            deliver(channel, data)

    tokens._inbox.deliver = lossy
    heard += [delta async for delta in tokens]
    assert "".join(d.text for d in heard) == TEXT
    assert offsets_are_gapless(heard)
    assert count > 20


async def test_a_slow_consumer_loses_nothing(
    mill, group, redis_client, monkeypatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_MESSAGES", 5)
    group.delay_s = 0.0005
    job = await mill.submit(TEXT)
    tokens = job.stream()
    heard = [await anext(tokens)]
    await job.result(60)  # everything was published, and mostly dropped, meanwhile
    heard += [delta async for delta in tokens]
    assert "".join(d.text for d in heard) == TEXT
    assert offsets_are_gapless(heard)


async def test_without_a_log_the_result_is_streamed(mill, group, redis_client) -> None:
    job = await mill.submit(TEXT)
    await job.result(60)
    await redis_client.delete(job.shard.log(job.id))
    tokens = job.stream()
    deltas = [delta async for delta in tokens]
    assert [d.text for d in deltas] == [TEXT]
    assert deltas[0].finish_reason == "stop"
    assert tokens.end.state == "succeeded"


async def test_a_log_that_was_cut_is_completed_from_the_result(
    mill, group, redis_client
) -> None:
    job = await mill.submit(TEXT)
    await job.result(60)
    log = job.shard.log(job.id)
    entries = await redis_client.xrange(log)
    await redis_client.xdel(log, *(entry_id for entry_id, _ in entries[10:]))
    deltas = [delta async for delta in job.stream()]
    assert "".join(d.text for d in deltas) == TEXT
    assert offsets_are_gapless(deltas)


async def test_failure_and_cancellation_come_after_the_text(mill, group) -> None:
    job = await mill.submit(TEXT)
    tokens = job.stream()
    heard = (await anext(tokens)).text
    await job.cancel()
    with pytest.raises(JobCancelled):  # noqa: PT012
        async for delta in tokens:
            heard += delta.text
    assert len(heard) > 1
    assert TEXT.startswith(heard)
    assert tokens.end.state == "cancelled"

    def answer(request):
        raise ValueError("no luck")

    group.answer = answer
    failed = await mill.submit("x")
    with pytest.raises(JobFailed, match="no luck"):
        await text_of(failed.stream())


async def test_a_job_cancelled_in_the_queue_ends_its_stream(mill, group) -> None:
    await group.pause()
    job = await mill.submit(TEXT)
    following = asyncio.ensure_future(text_of(job.stream()))
    await wait_until(lambda: mill._session.listener._watchers)
    await job.cancel()
    with pytest.raises(JobCancelled):
        await following
    with pytest.raises(JobCancelled):
        await text_of(job.stream())


async def test_an_unknown_job_has_no_stream(mill, group) -> None:
    with pytest.raises(UnknownJob):
        await text_of(mill.job(f"{DEFAULT_MODEL}.0.{'0' * 31}").stream())
    assert not mill._session.listener._watchers


async def test_leaving_early_unsubscribes(mill, group, redis_client) -> None:
    job = await mill.submit(TEXT)

    async def channels():
        return await redis_client.pubsub_channels("*wake:*")

    async for _ in job.stream():
        assert await channels()
        break
    await loop_turns()
    assert not mill._session.listener._watchers

    async def nobody():
        return not await channels()

    await wait_until(nobody, what="the end of the subscription")
    assert (await job.result(60)).text == TEXT, "leaving must not cancel"


@pytest.mark.parametrize("how", ["break", "close"])
async def test_leaving_may_cancel(mill, group, how: str) -> None:
    group.delay_s = 0.02
    job = await mill.submit(TEXT)
    if how == "break":
        async for _ in job.stream(cancel_on_leave=True):
            break
    else:
        async with job.stream(cancel_on_leave=True) as tokens:
            await anext(tokens)
    with pytest.raises(JobCancelled):
        await job.result(60)


async def test_a_cancelled_wait_can_be_taken_up_again(mill, group) -> None:
    job = await mill.submit("a b c")
    await group.pause()
    tokens, heard = job.stream(), ""
    for turn in range(200):
        patience_s = 0.003 + turn / 1000  # more each time, for a slow machine
        try:
            heard += (await asyncio.wait_for(anext(tokens), patience_s)).text
        except TimeoutError:
            group.serving.set()
        except StopAsyncIteration:
            break
    assert heard == "a b c"


async def test_a_stream_outlives_a_restart_of_redis() -> None:
    from support.servers import SERVERS, running

    with running(SERVERS[-1], "--appendonly", "yes", "--appendfsync", "always") as s:
        connection = redis.asyncio.Redis.from_url(s.url)
        async with Client(s.url, patience_s=20) as mill:
            group = FakeGroup(connection, delay_s=0.01)
            async with group:
                job = await mill.submit(TEXT)
                tokens = job.stream()
                heard = [await anext(tokens)]
                await group.die()
                s.kill()
                waiting = asyncio.ensure_future(_rest(tokens))
                done, _ = await asyncio.wait({waiting}, timeout=0.1)
                assert not done, "nothing answers yet"
                s.start()
                await group.scripts.forfeit(group.name)
                fence = await group.scripts.acquire_scheduler(group.name, 60_000)
                await group.scripts.reap(fence=fence, limit=10)
            async with FakeGroup(connection, delay_s=0.001):
                heard += await asyncio.wait_for(waiting, 60)
        await connection.aclose()
    assert "".join(d.text for d in heard) == TEXT
    assert offsets_are_gapless(heard)


async def _rest(tokens):
    return [delta async for delta in tokens]
