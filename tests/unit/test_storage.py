"""The store of large inputs: what is written is read, and nothing else is."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from support.waiting import loop_turns

from tokenmill.shared.config_load import load_config
from tokenmill.shared.errors import ConfigError, InputUnreadable, StorageUnavailable
from tokenmill.shared.input_refs import check_ref, ref_of
from tokenmill.shared.storage import Storage

TEXT = "a long text, ä€".encode() * 100


@pytest.fixture(params=["file", "local"])
def url(request, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/store"


@pytest.fixture
def store(url):
    made = Storage(url, max_bytes=10_000)
    yield made
    made.close()


async def test_an_input_is_read_as_it_was_written(store) -> None:
    ref = ref_of("acme", TEXT, "text")
    await store.write(ref, TEXT)
    await store.write(ref, TEXT)
    assert await store.read(ref, "acme") == TEXT
    (found,) = await store.inputs()
    assert (found.name, found.size) == (ref.name, len(TEXT))
    assert not await store.remove(ref.name, found.modified_s - 1)
    assert await store.remove(ref.name, found.modified_s + 1)
    assert await store.inputs() == []


async def test_a_missing_a_grown_and_a_changed_object_are_named(tmp_path) -> None:
    store = Storage(f"file://{tmp_path}", max_bytes=10_000)
    ref = ref_of("acme", TEXT, "text")
    with pytest.raises(StorageUnavailable, match="is it mounted"):
        await store.read(ref, "acme")
    await store.write(ref, TEXT)
    with pytest.raises(InputUnreadable, match="no object acme/"):
        await store.read(ref_of("acme", b"another", "text"), "acme")
    left = [path.name for path in (tmp_path / "acme").iterdir()]
    assert left == [ref.sha256]  # no part of a write
    path = tmp_path / ref.name
    path.write_bytes(TEXT[:-1])
    with pytest.raises(InputUnreadable, match=f"has {len(TEXT) - 1} bytes"):
        await store.read(ref, "acme")
    path.write_bytes(TEXT[:-1] + b"X")
    with pytest.raises(InputUnreadable, match="SHA-256"):
        await store.read(ref, "acme")
    store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../etc/passwd"},
        {"name": "/etc/passwd"},
        {"name": "file:///etc/passwd"},
        {"name": "s3://elsewhere/acme/x"},
        {"name": "acme/../other/x"},
        {"name": "other/{sha}"},
        {"name": "acme/{sha}/x"},
        {"name": "acme/{sha}\n"},
        {"sha256": "0" * 64},
        {"size": 0},
        {"size": 10_001},
    ],
)
async def test_a_reference_to_another_place_is_refused(store, changes) -> None:
    ref = ref_of("acme", TEXT, "text")
    await store.write(ref, TEXT)
    if "name" in changes:
        changes = {"name": changes["name"].format(sha=ref.sha256)}
    with pytest.raises(InputUnreadable):
        await store.read(msgspec.structs.replace(ref, **changes), "acme")
    check_ref(ref, "acme", 10_000)


async def test_the_store_is_probed_by_writing_and_reading(store, tmp_path) -> None:
    before = await store.probe()
    await store.write(ref_of("t", b"x", "text"), b"x")
    (found,) = await store.inputs()
    assert 0 <= found.modified_s - before < 60


async def test_a_store_that_cannot_be_written_says_so(tmp_path) -> None:
    place = tmp_path / "a-file"
    place.write_text("in the way")
    store = Storage(f"file://{place}", max_bytes=100)
    with pytest.raises(StorageUnavailable, match=r"a-file.*check the address"):
        await store.write(ref_of("t", b"x", "text"), b"x")
    with pytest.raises(StorageUnavailable):
        await store.probe()
    store.close()


@pytest.mark.parametrize(
    "url",
    ["s3://key:hunter2@bucket/p", "s3://hunter2@b", "hunter2", "file://hunter2",
     "s3://b/p?secret=hunter2"],
)  # fmt: skip
def test_an_address_with_credentials_is_refused_and_not_shown(url) -> None:
    with pytest.raises(ConfigError, match=r"storage\.url") as caught:
        load_config(None, {"TOKENMILL_STORAGE_URL": url})
    assert "hunter2" not in str(caught.value)


def test_a_gap_between_redis_and_the_store_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"storage\.offload_bytes"):
        load_config(None, {"TOKENMILL_STORAGE_OFFLOAD_BYTES": str(8 * 2**20)})


def test_a_store_of_an_unknown_kind_says_so() -> None:
    with pytest.raises(StorageUnavailable, match="nosuch"):
        Storage("nosuch://x/y", max_bytes=1)


async def test_a_store_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(StorageUnavailable, match=r"ftp://127\.0\.0\.1:1/x"):
        Storage("ftp://127.0.0.1:1/x", max_bytes=1)  # nobody listens there
    with pytest.raises(StorageUnavailable, match="in its memory"):
        Storage("memory://x", max_bytes=1)


async def test_the_wait_for_a_turn_is_not_the_stores(tmp_path, monkeypatch) -> None:
    store = Storage(f"file://{tmp_path}", max_bytes=10_000)
    loop, later_s = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + later_s[0])
    taken = 0
    while not store._turns.locked():
        await store._turns.acquire()
        taken += 1
    ref = ref_of("acme", TEXT, "text")
    writes = [asyncio.create_task(store.write(ref, TEXT)) for _ in range(28)]
    await loop_turns(5)
    later_s[0] = 3600.0  # longer than anything may take
    await loop_turns(5)
    for _ in range(taken):
        store._turns.release()
    await asyncio.gather(*writes)
    assert await store.read(ref, "acme") == TEXT
    store.close()


async def test_what_a_killed_writer_left_can_be_removed(tmp_path) -> None:
    store = Storage(f"file://{tmp_path}", max_bytes=10_000)
    ref = ref_of("acme", TEXT, "text")
    await store.write(ref, TEXT)
    (tmp_path / f"{ref.name}.1-ab.part").write_bytes(b"x")
    (tmp_path / ".probe-1").write_bytes(b"x")
    (tmp_path / "acme" / "a-note").write_bytes(b"x")
    found = {one.name for one in await store.inputs()}
    assert found == {ref.name, f"{ref.name}.1-ab.part", ".probe-1"}
    store.close()
