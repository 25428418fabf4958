"""/v1/files and /v1/batches through the official client, on a pool of processes."""

from collections.abc import Iterator

import msgspec
import openai
import pytest
import redis.asyncio
from support.batch_calls import (
    URL,
    begun,
    content_of,
    encoded,
    ended,
    line,
    nobody_serves,
)
from support.leaks import leaked_keys
from support.pools import UpProcess, up
from support.served import gateway_config, served
from support.waiting import wait_until

from tokenmill.producer.gateway.batches_lease import batch_records
from tokenmill.producer.gateway.batches_models import BatchRecord
from tokenmill.shared.api_keys import KeyStore, Scope
from tokenmill.shared.file_keys import batch_key
from tokenmill.shared.webhooks import deliveries


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """Echo worker, scheduler and janitor."""
    directory = tmp_path_factory.mktemp("pool")
    settings = {
        "TOKENMILL_WEBHOOKS_SECRET": "s" * 32,
        "TOKENMILL_WEBHOOKS_ALLOW_PRIVATE": "true",
    }
    with up(directory, janitor=True, **settings) as made:
        yield made


@pytest.fixture
async def gateway(pool, tmp_path):
    async with served(gateway_config(tmp_path, auth="none"), pool.url) as made:
        yield made


@pytest.fixture
async def client(gateway):
    async with openai.AsyncOpenAI(
        api_key="none", base_url=f"{gateway.url}/v1", max_retries=0, timeout=60
    ) as made:
        yield made


async def test_a_batch_has_openais_life(client) -> None:
    batch = await begun(client, [line(i) for i in range(20)], metadata={"k": "v"})
    assert batch.status == "validating"
    assert batch.object == "batch"
    assert batch.metadata == {"k": "v"}
    done = await ended(client, batch)

    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert done.error_file_id is None
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    assert done.usage is not None
    assert done.usage.total_tokens > 0
    times = [done.created_at, done.in_progress_at, done.finalizing_at]
    times.append(done.completed_at)
    assert times == sorted(times)
    assert done.expires_at == done.created_at + 86400

    assert done.output_file_id is not None
    file = await client.files.retrieve(done.output_file_id)
    assert file.purpose == "batch_output"
    lines = await content_of(client, done.output_file_id)
    assert sorted(one["custom_id"] for one in lines) == sorted(
        f"r{i}" for i in range(20)
    )
    for one in lines:
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        number = one["custom_id"].removeprefix("r")
        body = one["response"]["body"]
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == f"prompt number {number}"


async def test_bad_lines_are_errors_of_their_own(client) -> None:
    chat = line(90) | {"url": "/v1/chat/completions"}
    lines = [
        *(line(1), "{broken", line(2, temperature=9), line(3, tools=[{}])),
        *(line(1, "the same id"), chat, {"id": 4, "prompt": "simple"}, "", line(5)),
    ]
    done = await ended(client, await begun(client, lines))
    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 2, 6)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    good = await content_of(client, done.output_file_id)
    assert {one["custom_id"] for one in good} == {"r1", "r5"}
    bad = await content_of(client, done.error_file_id)
    wrong = {one["error"]["line"]: one["error"] for one in bad}
    assert sorted(wrong) == [2, 3, 4, 5, 6, 7]
    assert "temperature" in wrong[3]["message"]
    assert "tools" in wrong[4]["message"]
    assert "custom_id" in wrong[5]["message"]
    assert wrong[6]["param"] == "url"


@pytest.mark.parametrize("lines", [[], ["{broken", "[]"]])
async def test_nothing_to_run_fails_the_batch(client, lines) -> None:
    failed = await ended(client, await begun(client, lines), "failed")
    assert failed.errors is not None
    assert failed.errors.data
    assert failed.failed_at is not None
    assert failed.output_file_id is None
    if lines:
        assert [fault.line for fault in failed.errors.data] == [1, 2]
    else:
        assert failed.errors.data[0].code == "empty_file"


async def test_a_cancelled_batch_keeps_what_was_done(client, pool) -> None:
    async with nobody_serves(pool, "absent"):
        stuck = [line(i, model="absent") for i in range(100, 105)]
        batch = await begun(client, [line(1), line(2), *stuck])

        async def two_done() -> bool:
            now = await client.batches.retrieve(batch.id)
            return now.request_counts.completed == 2

        await wait_until(two_done, every_s=0.05)
        cancelled = await client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        done = await ended(client, batch, "cancelled")
    assert done.cancelled_at is not None
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    good = await content_of(client, done.output_file_id)
    assert {one["custom_id"] for one in good} == {"r1", "r2"}
    bad = await content_of(client, done.error_file_id)
    assert {one["custom_id"] for one in bad} == {f"r{i}" for i in range(100, 105)}
    assert {one["error"]["code"] for one in bad} == {"batch_cancelled"}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_whose_time_is_over_expires(client, pool, gateway) -> None:
    def is_over(record: BatchRecord, now_ms: int) -> BatchRecord:
        return msgspec.structs.replace(record, expires_ms=now_ms)

    async with nobody_serves(pool, "absent"):
        batch = await begun(client, [line(1), line(2, model="absent")])

        async def one_done() -> bool:
            now = await client.batches.retrieve(batch.id)
            return now.request_counts.completed == 1

        await wait_until(one_done, every_s=0.05)
        await batch_records(gateway.owner.client.session).change(batch.id, is_over)
        gateway.owner.batches.look(batch.id)
        done = await ended(client, batch, "expired")
    assert done.expired_at is not None
    assert done.error_file_id is not None
    bad = await content_of(client, done.error_file_id)
    assert [(b["custom_id"], b["error"]["code"]) for b in bad] == [
        ("r2", "batch_expired")
    ]


async def test_batches_are_listed_in_pages(client) -> None:
    ids = [(await begun(client, ["x"])).id for _ in range(5)]
    listed = [batch.id async for batch in client.batches.list(limit=2)]
    assert set(ids) <= set(listed)
    assert len(set(listed)) == len(listed)


async def test_what_is_wrong_with_a_batch_is_named(client) -> None:
    async def refused(status: type[openai.APIStatusError], **fields) -> str:
        with pytest.raises(status) as caught:
            await begun(client, [line(1)], **fields)
        return str(caught.value)

    assert "input_file_id" in await refused(openai.BadRequestError, input_file_id=7)
    await refused(openai.NotFoundError, input_file_id="file-unknown")
    message = await refused(openai.BadRequestError, endpoint="/v1/embeddings")
    assert "endpoint" in message
    await refused(openai.BadRequestError, completion_window="1h")
    message = await refused(openai.BadRequestError, extra_body={"colour": 1})
    assert "colour" in message
    many = {f"k{i}": "v" for i in range(17)}
    assert "metadata" in await refused(openai.BadRequestError, metadata=many)


async def test_a_repeat_with_an_idempotency_key_is_the_same_batch(client) -> None:
    file = await client.files.create(
        file=("in.jsonl", encoded([line(1)])), purpose="batch"
    )
    asked = {
        "input_file_id": file.id,
        "endpoint": URL,
        "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": file.id},
    }
    one = await client.batches.create(**asked)
    two = await client.batches.create(**asked)
    assert one.id == two.id
    with pytest.raises(openai.ConflictError):
        await client.batches.create(**asked, metadata={"other": "one"})
    await ended(client, one)


async def test_metadata_is_the_caller_s_own_and_means_nothing(client, gateway) -> None:
    free = {"webhook": "http://127.0.0.1:9/not-asked-for"}
    batch = await begun(client, [line(1)], metadata=free)
    assert batch.metadata == free
    await ended(client, batch)
    record = await gateway.owner.redis.get(batch_key(batch.id))
    assert msgspec.json.decode(record).get("webhook") is None


async def test_the_end_is_announced(client, gateway) -> None:
    address = "http://127.0.0.1:9/hook"
    batch = await begun(client, [line(1)], extra_body={"webhook": address})
    await ended(client, batch)

    async def told() -> bool:
        found = await deliveries(gateway.owner.redis, limit=20)
        return any(
            d.id == f"batch/{batch.id}" and d.type == "batch.completed" for d in found
        )

    await wait_until(told, what="the webhook")


async def test_nothing_of_it_is_another_tenants(pool, tmp_path) -> None:
    async with redis.asyncio.Redis.from_url(pool.url) as store:
        keys = KeyStore(store)
        one, _ = await keys.create("one", [Scope.BATCH])
        two, _ = await keys.create("two", [Scope.BATCH])
        only_jobs, _ = await keys.create("one", [Scope.INFERENCE])
        config = gateway_config(tmp_path, auth="keys")
        async with served(config, pool.url) as gateway:
            base = f"{gateway.url}/v1"

            def of(key: str) -> openai.AsyncOpenAI:
                return openai.AsyncOpenAI(api_key=key, base_url=base, max_retries=0)

            async with of(one) as mine, of(two) as other, of(only_jobs) as jobs:
                batch = await begun(mine, [line(1)])
                done = await ended(mine, batch)
                for call in (
                    other.batches.retrieve(batch.id),
                    other.batches.cancel(batch.id),
                    other.files.retrieve(batch.input_file_id),
                    other.files.content(done.output_file_id),
                    other.files.delete(batch.input_file_id),
                    other.batches.create(
                        input_file_id=batch.input_file_id,
                        endpoint=URL,
                        completion_window="24h",
                    ),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await call
                assert not [b async for b in other.batches.list()]
                assert not [f async for f in other.files.list()]
                with pytest.raises(openai.PermissionDeniedError):
                    await jobs.batches.list()


async def test_the_run_of_a_batch_is_shown_and_usage_counted(client, gateway) -> None:
    batch = await begun(client, [line(1), line(2)])
    await ended(client, batch)
    runs = (await gateway.http.get("/v1/bulk")).json()["data"]
    (run,) = [run for run in runs if run["name"] == batch.id]
    assert (run["kind"], run["state"], run["settled"]) == ("run", "complete", 2)
    assert (await gateway.http.get(f"/v1/bulk/{run['run']}")).json()["total"] == 2
    again = await gateway.http.post(f"/v1/bulk/{run['run']}/cancel")
    assert again.status_code == 200
    for odd in ("nonsense", "a" * 10):
        assert (await gateway.http.get(f"/v1/bulk/{odd}")).status_code == 404

    used = (await gateway.http.get("/v1/usage?days=2")).json()["data"]
    assert {row["tenant"] for row in used} == {"default"}
    assert sum(row["succeeded"] for row in used) >= 2
    assert sum(row["completion_tokens"] for row in used) > 0
    everyone = (await gateway.http.get("/v1/usage?all_tenants=true")).json()["data"]
    assert len(everyone) >= len(used)


async def test_everything_of_it_expires(client, gateway) -> None:
    await ended(client, await begun(client, [line(1)]))
    assert await leaked_keys(gateway.owner.redis) == []
