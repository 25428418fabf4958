"""The store of large inputs over S3, spoken by a real server."""

import pytest
from support.s3_server import BUCKET, s3_server

from tokenmill.shared.errors import InputUnreadable, StorageUnavailable
from tokenmill.shared.input_refs import ref_of
from tokenmill.shared.storage import Storage

pytest.importorskip("s3fs")
pytest.importorskip("moto")

TEXT = b"a long text " * 1000


@pytest.fixture(scope="module", autouse=True)
def server():
    with s3_server() as env:
        yield env


async def test_inputs_are_written_read_listed_and_removed() -> None:
    store = Storage(f"s3://{BUCKET}/some/prefix", max_bytes=100_000)
    now_s = await store.probe()
    ref = ref_of("acme", TEXT, "text")
    await store.write(ref, TEXT)
    assert await store.read(ref, "acme") == TEXT
    (found,) = await store.inputs()
    assert (found.name, found.size) == (ref.name, len(TEXT))
    assert abs(found.modified_s - now_s) < 60
    assert await store.remove(ref.name, found.modified_s + 60)
    assert await store.inputs() == []
    with pytest.raises(InputUnreadable, match="no object"):
        await store.read(ref, "acme")
    store.close()


async def test_an_object_that_was_changed_is_damaged() -> None:
    import s3fs

    store = Storage(f"s3://{BUCKET}/p2", max_bytes=100_000)
    ref = ref_of("acme", TEXT, "text")
    await store.write(ref, TEXT)
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    other.pipe_file(f"{BUCKET}/p2/{ref.name}", TEXT.upper())
    with pytest.raises(InputUnreadable, match="SHA-256"):
        await store.read(ref, "acme")
    store.close()


async def test_a_bucket_that_is_not_there_is_unavailable() -> None:
    store = Storage("s3://no-such-bucket/p", max_bytes=100_000)
    with pytest.raises(StorageUnavailable, match="s3://no-such-bucket/p"):
        await store.probe()
    store.close()
