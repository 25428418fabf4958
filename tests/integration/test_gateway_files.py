"""/v1/files: streamed to the store and back, bounded, apart per tenant, removed."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import redis.asyncio
from support.s3_server import BUCKET, s3_server
from support.served import Served, gateway_config, served
from support.waiting import wait_until

from tokenmill.producer.gateway import files_quota
from tokenmill.shared.file_keys import arriving_key, file_key, files_key

MOST = 300_000
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
"""Begins a form; the boundary is `b`."""


@pytest.fixture
async def store(newest_redis):
    async with redis.asyncio.Redis.from_url(newest_redis.url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def gateway(newest_redis, store, tmp_path) -> AsyncIterator[Served]:
    config = gateway_config(tmp_path, max_file_bytes=MOST)
    async with served(config, newest_redis.url) as made:
        yield made


async def upload(gateway: Served, content: bytes, name: str = "a.jsonl", **fields):
    data = {"purpose": "batch", **fields}
    return await gateway.http.post(
        "/v1/files", data=data, files={"file": (name, content)}
    )


def objects(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "files").rglob("*") if path.is_file()]


async def test_the_official_client_uploads_lists_reads_and_deletes(gateway) -> None:
    content = os.urandom(200_000)
    async with openai.AsyncOpenAI(
        api_key="none", base_url=f"{gateway.url}/v1", max_retries=0
    ) as client:
        made = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (made.bytes, made.filename, made.purpose) == (
            200_000,
            "in.jsonl",
            "batch",
        )
        assert made.status == "processed"
        assert made.expires_at is not None
        assert made.expires_at > made.created_at
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == content
        more = [
            await client.files.create(file=(f"{i}", b"x"), purpose="batch")
            for i in range(4)
        ]
        listed = [file.id async for file in client.files.list(limit=2, order="asc")]
        assert sorted(listed) == sorted([made.id, *(file.id for file in more)])
        assert (await client.files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(made.id)


async def test_a_file_that_is_too_large_leaves_nothing(gateway, tmp_path) -> None:
    assert (await upload(gateway, b"x" * MOST)).status_code == 200
    refused = await upload(gateway, b"x" * (MOST + 1))
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "file_too_large"
    assert len(objects(tmp_path)) == 1


async def test_an_upload_is_written_while_it_arrives(gateway, tmp_path) -> None:
    """The sender waits for what it sent to be in the store; memory holds a chunk."""
    more = asyncio.Event()
    tail = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch'

    async def body() -> AsyncIterator[bytes]:
        yield HEAD + b"x" * 280_000
        await more.wait()
        yield tail + b"\r\n--b--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    sending = asyncio.create_task(
        gateway.http.post("/v1/files", content=body(), headers=headers)
    )

    def arrived() -> bool:
        return any(path.stat().st_size >= 262_144 for path in objects(tmp_path))

    await wait_until(arrived, what="a chunk in the store")
    more.set()
    reply = await sending
    assert reply.json()["bytes"] == 280_000


async def test_a_sender_that_leaves_leaves_nothing(gateway, tmp_path) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield HEAD + b"x" * 270_000
        await wait_until(lambda: objects(tmp_path))
        raise ConnectionError("the sender is gone")

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    with pytest.raises((ConnectionError, httpx.TransportError)):
        await gateway.http.post("/v1/files", content=body(), headers=headers)
    await wait_until(lambda: not objects(tmp_path), what="an empty store")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "multipart/form-data; boundary=b"),
        (b"hello", "multipart/form-data; boundary=b"),
        (b"{}", "application/json"),
        (b"--b\r\n\r\nno name\r\n--b--\r\n", "multipart/form-data; boundary=b"),
        (b"x", "multipart/form-data"),
        (
            HEAD + b"cut off",
            "multipart/form-data; boundary=b",
        ),
    ],
)
async def test_what_is_no_upload_is_refused(gateway, tmp_path, content, kind) -> None:
    headers = {"Content-Type": kind}
    reply = await gateway.http.post("/v1/files", content=content, headers=headers)
    assert reply.status_code == 400, reply.text
    assert not objects(tmp_path)


async def test_fields_that_mean_nothing_are_named(gateway, tmp_path) -> None:
    for fields, param in (
        ({"purpose": "vision"}, "purpose"),
        ({"colour": "red"}, "colour"),
    ):
        reply = await upload(gateway, b"x", **fields)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
    reply = await gateway.http.post("/v1/files", files={"other": ("a", b"x")})
    assert reply.status_code == 400
    assert not objects(tmp_path)


async def test_names_lead_nowhere(gateway, tmp_path) -> None:
    for name in ("../../etc/passwd", "C:\\x\\..\\y", "\n", "a" * 500, ".."):
        reply = await upload(gateway, b"x", name)
        assert reply.status_code == 200
        shown = reply.json()["filename"]
        assert "/" not in shown
        assert "\\" not in shown
        assert 0 < len(shown) <= 200
        content = await gateway.http.get(f"/v1/files/{reply.json()['id']}/content")
        assert content.status_code == 200
    for odd in ("file-..", "..", f"file-{'0' * 32}%2f..", "file-" + "g" * 32):
        assert (await gateway.http.get(f"/v1/files/{odd}")).status_code == 404
    (pool,) = (tmp_path / "files").iterdir()
    assert all(path.parent == pool / "default" for path in objects(tmp_path))


async def test_what_nobody_lists_is_removed(gateway, tmp_path, store) -> None:
    kept = (await upload(gateway, b"kept")).json()["id"]
    gone = (await upload(gateway, b"gone")).json()["id"]
    await store.delete(file_key(gone))  # as when its time is over
    (pool,) = (tmp_path / "files").iterdir()
    torn = f"file-{'0' * 32}.{'a' * 8}.part"
    (pool / "default" / torn).write_bytes(b"of a killed gateway")
    assert await gateway.owner.files.clean(grace_s=3600) == 0
    assert await gateway.owner.files.clean(grace_s=-1) == 2
    assert [path.name for path in objects(tmp_path)] == [kept]
    assert await store.zrange(files_key("default"), 0, -1) == [kept.encode()]
    listed = (await gateway.http.get("/v1/files")).json()["data"]
    assert [file["id"] for file in listed] == [kept]


async def test_what_is_not_this_pools_is_left_alone(gateway, tmp_path, store) -> None:
    """Whatever its name, and however old: the store may be a home directory."""
    await upload(gateway, b"x")
    (pool,) = (tmp_path / "files").iterdir()
    others = [
        tmp_path / "files" / place
        for place in (
            *("thesis.txt", "photos/cat.jpg", "photos/2019/dog.jpg"),
            f"acme/file-{'0' * 32}",
            f"pool-{'0' * 16}/acme/file-{'0' * 32}",
            f"{pool.name}/notes/why.txt",
        )
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    await store.delete(*await store.keys("tm:file:file-*"))
    assert await gateway.owner.files.clean(grace_s=-1) == 1
    assert sorted(objects(tmp_path)) == sorted(others)


async def test_pools_with_one_store_keep_apart(gateway, tmp_path, store) -> None:
    await upload(gateway, b"first")
    await store.flushall()  # another pool's Redis
    config = gateway_config(tmp_path)
    async with served(config, gateway.owner.url) as other:
        await upload(other, b"second")
        assert await other.owner.files.clean(grace_s=-1) == 0
    assert len(objects(tmp_path)) == 2


async def test_records_expire_with_their_files(gateway, store) -> None:
    file_id = (await upload(gateway, b"x")).json()["id"]
    keep_s = gateway.owner.config.gateway.files_keep_s
    for key in (file_key(file_id), files_key("default")):
        assert keep_s - 60 < await store.ttl(key) <= keep_s


async def test_a_file_outlives_the_batch_that_reads_it(
    newest_redis, store, tmp_path
) -> None:
    short = gateway_config(tmp_path, files_keep_s=60)
    async with served(short, newest_redis.url) as gateway:
        file_id = (await upload(gateway, b"x")).json()["id"]
        assert await store.ttl(file_key(file_id)) <= 60
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = (await gateway.http.post("/v1/batches", json=body)).json()
        file = (await gateway.http.get(f"/v1/files/{file_id}")).json()
        assert file["expires_at"] > batch["expires_at"]
        await upload(gateway, b"another, which is kept for a minute")
        for key in (file_key(file_id), files_key("default")):
            assert await store.ttl(key) > 24 * 3600
    async with served(gateway_config(tmp_path), newest_redis.url) as gateway:
        file_id = (await upload(gateway, b"x")).json()["id"]
        before = (await gateway.http.get(f"/v1/files/{file_id}")).json()
        await gateway.http.post("/v1/batches", json=body | {"input_file_id": file_id})
        assert (await gateway.http.get(f"/v1/files/{file_id}")).json() == before


async def test_another_gateway_serves_the_same_files(
    gateway, newest_redis, tmp_path
) -> None:
    file_id = (await upload(gateway, b"shared")).json()["id"]
    async with served(gateway_config(tmp_path), newest_redis.url) as other:
        reply = await other.http.get(f"/v1/files/{file_id}/content")
        assert reply.content == b"shared"


@pytest.fixture
def bucket():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server():
        yield f"s3://{BUCKET}/files"


async def test_a_bucket_serves_as_well(newest_redis, store, tmp_path, bucket) -> None:
    config = gateway_config(tmp_path, files_url=bucket, max_file_bytes=MOST)
    async with served(config, newest_redis.url) as gateway:
        content = os.urandom(280_000)
        file_id = (await upload(gateway, content)).json()["id"]
        reply = await gateway.http.get(f"/v1/files/{file_id}/content")
        assert reply.content == content
        refused = await upload(gateway, b"x" * (MOST + 1))
        assert refused.status_code == 413
        found = await (await gateway.owner.files.store()).objects()
        assert [name for name, _ in found] == [f"default/{file_id}"]


async def test_a_tenant_has_room_for_so_many_files_and_bytes(
    newest_redis, store, tmp_path
) -> None:
    config = gateway_config(
        tmp_path, max_file_bytes=MOST, max_tenant_files=3, max_tenant_bytes=100_000
    )
    async with served(config, newest_redis.url) as gateway:
        assert (await upload(gateway, b"x" * 60_000)).status_code == 200
        for size in (40_001, 90_000):
            refused = await upload(gateway, b"x" * size)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "files_quota_exceeded"
        assert len(objects(tmp_path)) == 1
        small = [await upload(gateway, b"x") for _ in range(2)]
        assert [reply.status_code for reply in small] == [200, 200]
        assert "max_tenant_files" in (await upload(gateway, b"x")).text
        await gateway.http.delete(f"/v1/files/{small[0].json()['id']}")
        assert (await upload(gateway, b"x" * 30_000)).status_code == 200


async def test_more_uploads_than_connections_to_redis_wait_for_none(gateway) -> None:
    """Each counts over a second connection while it holds one."""
    files = gateway.owner.files
    at_once = 2 * gateway.owner.redis.connection_pool.max_connections

    async def arrive(number: int) -> int:
        name = f"file-{number}"
        room = files.quota.room(files.records, f"tenant-{number}", name, 1000)
        async with room as most:
            return most

    found = await asyncio.gather(*map(arrive, range(at_once)))
    assert found == [MOST] * at_once


async def test_uploads_that_arrive_at_once_share_the_room(
    newest_redis, store, tmp_path
) -> None:
    config = gateway_config(tmp_path, max_tenant_bytes=100_000)
    async with served(config, newest_redis.url) as gateway:
        replies = await asyncio.gather(
            *(upload(gateway, b"x" * 40_000) for _ in range(6))
        )
        assert sorted(reply.status_code for reply in replies) == [200] * 2 + [403] * 4
        assert len(objects(tmp_path)) == 2


async def test_uploads_through_two_gateways_share_the_room(
    newest_redis, store, tmp_path
) -> None:
    config = gateway_config(tmp_path, max_tenant_bytes=100_000)
    async with (
        served(config, newest_redis.url) as one,
        served(config, newest_redis.url) as other,
    ):
        replies = await asyncio.gather(
            *(upload(gateway, b"x" * 40_000) for gateway in (one, other) * 3)
        )
    assert sorted(reply.status_code for reply in replies) == [200] * 2 + [403] * 4
    assert not await store.exists(arriving_key("default"))


async def test_the_room_of_an_upload_is_kept_while_it_lasts_and_lapses_with_its_gateway(
    newest_redis, store, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(files_quota, "NOTE_S", 0.3)
    config = gateway_config(tmp_path, max_tenant_bytes=100_000)
    key = arriving_key("default")
    async with served(config, newest_redis.url) as gateway:
        files = gateway.owner.files
        async with files.quota.room(files.records, "default", "file-a", 70_000) as most:
            assert most == 100_000
            ((note, until),) = await wait_until(
                lambda: store.zrange(key, 0, -1, withscores=True), what="the note"
            )
            assert note == b"file-a:70000"

            async def renewed():
                return (await store.zscore(key, note) or 0) > until

            await wait_until(renewed, what="the note is renewed")
        monkeypatch.undo()
        # As a gateway leaves it that is killed, and a moment later.
        seconds, _ = await store.time()
        await store.zadd(key, {"file-b:70000": (seconds + 60) * 1000})
        refused = await upload(gateway, b"x" * 40_000)
        assert refused.json()["error"]["code"] == "files_quota_exceeded"
        await store.zadd(key, {"file-b:70000": (seconds - 1) * 1000})
        assert (await upload(gateway, b"x" * 40_000)).status_code == 200


async def test_a_store_that_is_away_is_told(newest_redis, store, tmp_path) -> None:
    (tmp_path / "files").write_text("no directory")
    async with served(gateway_config(tmp_path), newest_redis.url) as gateway:
        reply = await upload(gateway, b"x")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "storage_unavailable"
        assert reply.headers["retry-after"]
        assert str(tmp_path) not in reply.text
