"""Output of a batch in parts: merged, taken over, put together with each line once."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
from support.s3_server import BUCKET, s3_server

from tokenmill.producer.bulk.answers import RequestForm
from tokenmill.producer.bulk.flow import Done, Fed, Refused
from tokenmill.producer.bulk.index import Index
from tokenmill.producer.bulk.line_source import LineSource, Parsed
from tokenmill.producer.gateway import batches_parts
from tokenmill.producer.gateway.batches_files import assemble
from tokenmill.producer.gateway.batches_models import BatchRecord
from tokenmill.producer.gateway.batches_parts import PartLine, Parts, PartSink
from tokenmill.producer.gateway.batches_scratch import Scratch
from tokenmill.producer.gateway.files_store import FilesStore
from tokenmill.shared.bulk.messages import Item, Outcome
from tokenmill.shared.errors import BulkOutputFailed
from tokenmill.shared.messages import JobError, JobResult, Prompt

RECORD = BatchRecord(
    id=f"batch_{'0' * 32}",
    tenant="t",
    run="a" * 10,
    endpoint="/v1/completions",
    input_file_id=f"file-{'1' * 32}",
    output_id=f"file-{'2' * 32}",
    error_id=f"file-{'3' * 32}",
    created_ms=0,
    expires_ms=0,
)
FORM = RequestForm(RECORD.run, now=lambda: 0.0)


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "directory":
        yield FilesStore((tmp_path / "files").as_uri())
        return
    pytest.importorskip("s3fs")
    with s3_server():
        yield FilesStore(f"s3://{BUCKET}/files")


def settled(seq: int, state: str = "succeeded") -> Done | Refused:
    if state == "refused":
        error = JobError("invalid_request", "wrong")
        return Refused(seq=seq, error=error, label="completions", line=seq + 1)
    item = Item(seq=seq, custom_id=f"r{seq}", prompt=Prompt("x"))
    result = JobResult(id=f"m.0.{'a' * 16}", state=state, model="m")
    error = None if state == "succeeded" else JobError("engine_error", "broken")
    outcome = Outcome(seq=seq, state=state, result=result, error=error)
    return Done(fed=Fed(item=item, label="completions"), outcome=outcome)


def sink(store: FilesStore, path: Path, attempt: str) -> PartSink:
    return PartSink(Parts(store, RECORD.name), Index(path / attempt), FORM)


def content(store: FilesStore, file_id: str) -> list[bytes]:
    with store.opened(f"{RECORD.tenant}/{file_id}") as file:
        return file.read().splitlines()


def put_together(store: FilesStore, rest=None, ended: str = "completed", *, total: int):
    parts = Parts(store, RECORD.name)
    record = msgspec.structs.replace(RECORD, total=total)
    return assemble(store, record, parts, rest, FORM, ended, threading.Event())


def test_small_parts_are_merged_and_none_is_lost(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(batches_parts, "FAN", 4)
    store = FilesStore(tmp_path.as_uri())
    parts = Parts(store, RECORD.name)
    count = 4 * 4 + 4 + 3
    for seq in range(count):
        parts.write([PartLine(seq, "succeeded", b"{}\n")])
    names = parts.names()
    assert len(names) == 1 + 1 + 3
    found = [line.seq for name in names for line in parts.read(name)]
    assert sorted(found) == list(range(count))


def test_a_second_writer_goes_on_and_double_lines_come_once(store, tmp_path) -> None:
    first = sink(store, tmp_path, "first")
    first.write([settled(seq) for seq in (0, 1, 2)])
    first.write([settled(3, "failed"), settled(4, "refused")])

    second = sink(store, tmp_path, "second")
    second.load()
    assert second.written([0, 1, 2, 3, 4, 5]) == {0, 1, 2, 3, 4}
    assert second.counts() == {"succeeded": 3, "failed": 1, "refused": 1}
    second.write([settled(seq) for seq in (2, 5)])
    first.write([settled(5), settled(6)])  # it was thought dead, and was not
    second.load()
    assert second.written([5, 6]) == {5, 6}

    made = put_together(store, total=7)
    assert (made.completed, made.failed) == (5, 2)
    lines = content(store, RECORD.output_id)
    assert len(lines) == len(set(lines)) == 5
    assert len(content(store, RECORD.error_id)) == 2
    again = put_together(store, total=7)
    assert again == made

    asyncio.run(store.remove_all(RECORD.name))
    assert Parts(store, RECORD.name).names() == []


def test_the_same_gateway_takes_a_batch_up_again_and_loses_nothing(tmp_path) -> None:
    """As after an outage of Redis that is longer than a lease."""
    store = FilesStore((tmp_path / "files").as_uri())
    for attempt in range(3):
        again = sink(store, tmp_path, f"{attempt}")
        again.load()
        assert again.written([0, 1, 2, 3]) == set(range(attempt))
        again.write([settled(attempt)])
    made = put_together(store, total=3)
    assert made.completed == 3


@pytest.mark.parametrize("ended", ["completed", "expired"])
def test_no_batch_ends_while_a_line_is_missing(tmp_path, ended) -> None:
    store = FilesStore((tmp_path / "files").as_uri())
    sink(store, tmp_path, "one").write([settled(0), settled(1)])
    with pytest.raises(BulkOutputFailed, match="2 lines"):
        put_together(store, None, ended, total=3)
    with pytest.raises(FileNotFoundError):
        content(store, RECORD.output_id)


def test_what_was_never_done_is_told_in_the_error_file(tmp_path) -> None:
    class Reader:
        max_bytes = 1000

        def read(self, data: bytes) -> Parsed:
            return Parsed(
                label="completions", custom_id=data.decode(), content=Prompt("x")
            )

    store = FilesStore((tmp_path / "files").as_uri())
    path = tmp_path / "input"
    path.write_text("r0\nr1\nr2\n")
    one = sink(store, tmp_path, "one")
    one.write([settled(1)])
    rest = LineSource(path, one._index, Reader())
    made = put_together(store, rest, "expired", total=3)
    assert (made.completed, made.failed) == (1, 0)
    errors = content(store, RECORD.error_id)
    assert len(errors) == 2
    assert all(b'"batch_expired"' in line for line in errors)


def test_a_batch_without_lines_has_no_files(tmp_path) -> None:
    store = FilesStore(tmp_path.as_uri())
    made = put_together(store, total=0)
    assert (made.output_bytes, made.error_bytes) == (0, 0)
    with pytest.raises(FileNotFoundError):
        content(store, RECORD.output_id)


def test_what_killed_gateways_left_on_disk_is_removed(tmp_path) -> None:
    alive = Scratch(tmp_path)
    killed = tmp_path / "gateway-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (killed / "index.sqlite").write_bytes(b"x")
    other = Scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive.path, other.path])
    for scratch in (alive, other):
        scratch.remove()
    assert list(tmp_path.iterdir()) == []
