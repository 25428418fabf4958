"""Batches under faults and load: taken up again, beside broken ones, in turns."""

import asyncio
import gzip
from collections.abc import Iterator

import msgspec
import openai
import pytest
from support.batch_calls import (
    URL,
    begun,
    content_of,
    encoded,
    ended,
    line,
    nobody_serves,
)
from support.pools import UpProcess, up
from support.served import Served, gateway_config, served
from support.waiting import wait_until

from tokenmill.producer.gateway import batches_api, batches_keeper
from tokenmill.producer.gateway.batches_end import BatchEnd
from tokenmill.producer.gateway.batches_files import Assembled
from tokenmill.producer.gateway.batches_lease import batch_records, claim
from tokenmill.producer.gateway.batches_models import BatchRecord
from tokenmill.shared.errors import LeaseLost
from tokenmill.shared.file_keys import OPEN_BATCHES, batch_key, batches_key


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """Echo worker, scheduler and janitor."""
    with up(tmp_path_factory.mktemp("pool"), janitor=True) as made:
        yield made


@pytest.fixture
def settings() -> dict:
    return {}


@pytest.fixture
async def gateway(pool, tmp_path, settings):
    config = gateway_config(tmp_path, auth="none", batch_lease_s=1.0, **settings)
    async with served(config, pool.url) as made:
        yield made


@pytest.fixture
async def client(gateway):
    async with client_of(gateway) as made:
        yield made


def client_of(gateway: Served, tenant: str = "default") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none",
        base_url=f"{gateway.url}/v1",
        max_retries=0,
        timeout=60,
        default_headers={"X-Tokenmill-Tenant": tenant},
    )


async def done_of(client, batch, least: int) -> None:
    async def far_enough() -> bool:
        now = await client.batches.retrieve(batch.id)
        assert now.status in ("validating", "in_progress"), now
        return now.request_counts.completed >= least

    await wait_until(far_enough, every_s=0.02, what=f"{least} lines")


async def lose_lease(gateway: Served, batch_id: str) -> None:
    """As when the gateway was thought dead while Redis did not answer."""

    def other(record: BatchRecord, _now_ms: int) -> BatchRecord:
        return msgspec.structs.replace(record, driver="another", driver_until_ms=0)

    records = batch_records(gateway.owner.client.session)
    now = await records.change(batch_id, other)
    assert not now.has_ended


async def test_a_batch_that_its_own_gateway_takes_again_is_whole(
    gateway, client
) -> None:
    count = 2500
    batch = await begun(client, [line(i) for i in range(count)])
    await done_of(client, batch, 1)
    await lose_lease(gateway, batch.id)
    done = await ended(client, batch)
    assert done.request_counts.completed == count
    lines = await content_of(client, done.output_file_id)
    assert {one["custom_id"] for one in lines} == {f"r{i}" for i in range(count)}
    assert len(lines) == count


async def test_lines_that_the_store_lost_run_again(gateway, client) -> None:
    batch = await begun(client, [line(i) for i in range(1500)])
    await done_of(client, batch, 1)
    store = await gateway.owner.files.store()
    parts = await store.parts(f"default/{batch.id}")
    await store.remove(parts[0])
    done = await ended(client, batch)
    assert done.request_counts.completed == 1500
    lines = await content_of(client, done.output_file_id)
    assert {one["custom_id"] for one in lines} == {f"r{i}" for i in range(1500)}


async def test_a_driver_that_was_thought_dead_writes_over_nothing(gateway) -> None:
    session, files = gateway.owner.client.session, gateway.owner.files
    records = batch_records(session)
    batch_id = f"batch_{'d' * 32}"
    record = BatchRecord(
        id=batch_id,
        tenant="slow",
        run="d" * 10,
        endpoint=URL,
        input_file_id=f"file-{'1' * 32}",
        output_id=f"file-{'2' * 32}",
        error_id=f"file-{'3' * 32}",
        status="in_progress",
        created_ms=0,
        expires_ms=2**50,
    )
    await records.add(batch_id, "slow", record, 0, 60_000)
    assembled = Assembled(output_bytes=5, error_bytes=0, completed=1, failed=0)

    async def begin(driver: str) -> tuple[BatchEnd, BatchRecord]:
        lease = await claim(session, batch_id, driver, 0)
        assert lease is not None
        end = BatchEnd(files, lease)
        return end, await end.begin("completed")

    async def write(record: BatchRecord, content: bytes) -> None:
        async with files.writing("slow", record.output_id) as written:
            await written.write(content)

    slow, slow_record = await begin("slow")
    fast, fast_record = await begin("fast")
    await write(fast_record, b"whole")
    await fast.finish("completed", assembled)
    await write(slow_record, b"stale")
    with pytest.raises(LeaseLost):
        await slow.finish("completed", assembled)

    now = await records.get(batch_id)
    assert (now.status, now.output_id) == ("completed", fast_record.output_id)
    async with client_of(gateway, "slow") as client:
        assert (await client.files.content(now.output_id)).content == b"whole"
        listed = [file.id async for file in client.files.list()]
    assert listed == [now.output_id]


async def test_a_record_that_cannot_be_read_stops_no_other_batch(
    gateway, client, pool
) -> None:
    async with nobody_serves(pool, "absent"):
        running = await begun(client, [line(1), line(2, model="absent")])
        await done_of(client, running, 1)
        tasks = dict(gateway.owner.batches._tasks)
        odd, redis = f"batch_{'f' * 32}", gateway.owner.redis
        await redis.set(batch_key(odd), b'{"status": "of another release"}', px=60_000)
        await redis.zadd(OPEN_BATCHES, {odd: 1})
        try:
            await ended(client, await begun(client, [line(3)]))
            assert gateway.owner.batches._tasks[running.id] is tasks[running.id]
            await redis.zadd(batches_key("default"), {odd: 1})
            listed = [batch.id async for batch in client.batches.list()]
            assert running.id in listed
            assert odd not in listed
        finally:
            await redis.delete(batch_key(odd))
            await redis.zrem(OPEN_BATCHES, odd)
            await redis.zrem(batches_key("default"), odd)
        await client.batches.cancel(running.id)
        await ended(client, running, "cancelled")


async def test_one_tenants_batches_keep_nobody_elses_waiting(
    gateway, pool, monkeypatch
) -> None:
    monkeypatch.setattr(batches_keeper, "MOST_DRIVEN", 2)
    monkeypatch.setattr(batches_keeper, "MOST_OF_A_TENANT", 1)
    stuck = [line(1, model="absent")]
    async with (
        nobody_serves(pool, "absent"),
        client_of(gateway, "greedy") as greedy,
        client_of(gateway, "modest") as modest,
    ):
        first = await begun(greedy, stuck)
        await wait_until(lambda: gateway.owner.batches._tasks, what="its work")
        second = await begun(greedy, stuck)
        with monkeypatch.context() as short:
            short.setattr(batches_api, "WINDOW_MS", 500)
            third = await begun(greedy, stuck)
        await ended(modest, await begun(modest, [line(1)]))
        # Those that wait end all the same.
        await greedy.batches.cancel(second.id)
        await ended(greedy, second, "cancelled")
        await ended(greedy, third, "expired")
        await wait_until(lambda: list(gateway.owner.batches._tasks) == [first.id])
        await greedy.batches.cancel(first.id)
        await ended(greedy, first, "cancelled")


@pytest.mark.parametrize("settings", [{"max_tenant_batches": 2}])
async def test_a_tenant_has_so_many_open_batches(gateway, client, pool) -> None:
    stuck = [line(1, model="absent")]
    again = {"extra_headers": {"Idempotency-Key": gateway.url}}
    async with nobody_serves(pool, "absent"):
        one = await begun(client, stuck)
        file_id = one.input_file_id
        asked = {
            "input_file_id": file_id,
            "endpoint": URL,
            "completion_window": "24h",
        }
        two = await client.batches.create(**asked, **again)
        with pytest.raises(openai.RateLimitError, match="max_tenant_batches"):
            await client.batches.create(**asked)
        assert (await client.batches.create(**asked, **again)).id == two.id
        async with client_of(gateway, "other") as other:
            await ended(other, await begun(other, [line(1)]))
        with pytest.raises(openai.ConflictError, match="reads the file"):
            await client.files.delete(file_id)
        for batch in (one, two):
            await client.batches.cancel(batch.id)
            await ended(client, batch, "cancelled")
    await ended(client, await begun(client, [line(1)]))
    assert (await client.files.delete(file_id)).deleted


@pytest.mark.parametrize("settings", [{"max_tenant_batches": 2}])
async def test_batches_begun_at_the_same_moment_are_no_more_than_that(
    gateway, client, pool, tmp_path, settings
) -> None:
    """Through two gateways."""
    config = gateway_config(tmp_path, auth="none", batch_lease_s=1.0, **settings)
    async with (
        nobody_serves(pool, "absent"),
        served(config, pool.url) as beside,
        client_of(beside) as other,
    ):
        stuck = ("in.jsonl", encoded([line(1, model="absent")]))
        file = await client.files.create(file=stuck, purpose="batch")
        asked = {
            "input_file_id": file.id,
            "endpoint": URL,
            "completion_window": "24h",
        }
        made = await asyncio.gather(
            *((client, other)[n % 2].batches.create(**asked) for n in range(8)),
            return_exceptions=True,
        )
        open_now = [one for one in made if isinstance(one, openai.types.Batch)]
        refused = [one for one in made if isinstance(one, openai.RateLimitError)]
        assert (len(open_now), len(refused)) == (2, 6), made
        assert all("max_tenant_batches" in str(one) for one in refused)
        for batch in open_now:
            await client.batches.cancel(batch.id)
            await ended(client, batch, "cancelled")


async def test_what_is_done_outlives_the_input(gateway, client, pool, tmp_path) -> None:
    async with nobody_serves(pool, "absent"):
        batch = await begun(client, [line(1), line(2, model="absent")])
        await done_of(client, batch, 1)
        await gateway.owner.files.discard("default", batch.input_file_id)
        await lose_lease(gateway, batch.id)
        done = await ended(client, batch, "failed")
    assert [fault.code for fault in done.errors.data] == ["file_not_found"]
    assert str(tmp_path) not in done.to_json()
    lines = await content_of(client, done.output_file_id)
    assert [one["custom_id"] for one in lines] == ["r1"]


@pytest.mark.parametrize("settings", [{"max_batch_lines": 10_000}])
async def test_millions_of_blank_lines_fail_the_batch(client, tmp_path) -> None:
    packed = gzip.compress(b"\n" * 2_000_000)
    file = await client.files.create(file=("in.gz", packed), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h"
    )
    failed = await ended(client, batch, "failed")
    assert [fault.code for fault in failed.errors.data] == ["payload_too_large"]
    assert "max_batch_lines" in failed.errors.data[0].message


async def test_a_damaged_input_is_told_without_its_path(client, tmp_path) -> None:
    packed = gzip.compress(b"x" * 1000)[:-12]
    file = await client.files.create(file=("in.gz", packed), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h"
    )
    failed = await ended(client, batch, "failed")
    assert "the input file cannot be read" in failed.errors.data[0].message
    assert str(tmp_path) not in failed.to_json()


async def test_a_gateway_that_goes_hands_its_batches_on(pool, tmp_path) -> None:
    """At once: the lease of the first would last for a minute."""
    config = gateway_config(tmp_path, auth="none", batch_lease_s=60)

    def of(gateway) -> openai.AsyncOpenAI:
        base = f"{gateway.url}/v1"
        return openai.AsyncOpenAI(api_key="none", base_url=base, max_retries=0)

    async with nobody_serves(pool, "absent"):
        async with served(config, pool.url) as first, of(first) as client:
            batch = await begun(client, [line(1), line(2, model="absent")])

            async def one_done() -> bool:
                now = await client.batches.retrieve(batch.id)
                return now.request_counts.completed == 1

            await wait_until(one_done, every_s=0.05)
        async with served(config, pool.url) as second, of(second) as client:
            await client.batches.cancel(batch.id)
            done = await ended(client, batch, "cancelled")
            assert done.request_counts.completed == 1
            good = await content_of(client, done.output_file_id)
            assert [one["custom_id"] for one in good] == ["r1"]
