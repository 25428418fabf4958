"""The output of a bulk command: partial file, index, order, retries, crashes."""

import contextlib
import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.fake_run import done, fed, succeed

from tokenmill.producer.bulk import finishing
from tokenmill.producer.bulk import place as place_module
from tokenmill.producer.bulk.finishing import finish, prepare_retry, recover
from tokenmill.producer.bulk.flow import Done, Refused, Settled
from tokenmill.producer.bulk.index import Index
from tokenmill.producer.bulk.place import Lock, Place
from tokenmill.producer.bulk.sink import FileSink
from tokenmill.shared.errors import BulkOutputFailed, BulkRunConflict
from tokenmill.shared.messages import JobError


def form(settled: Settled) -> bytes:
    """A line that names its item, of a length of its own."""
    text = "x" * (settled.seq % 7)
    return json.dumps({"seq": settled.seq, "text": text}).encode()


def failed(seq: int) -> Done:
    item = fed(seq).item
    outcome = msgspec.structs.replace(succeed(item), state="failed")
    return Done(fed=fed(seq), outcome=outcome)


def refused(seq: int) -> Refused:
    return Refused(seq=seq, error=JobError("invalid_request", "no"))


class Output:
    """One output, opened and closed as a command does."""

    def __init__(self, directory: Path, name: str = "out.jsonl") -> None:
        self.place = Place(directory / name)
        self.place.make()
        self.index = Index(self.place.index)

    def reopen(self) -> None:
        self.index.close()
        self.index = Index(self.place.index)
        recover(self.place, self.index)

    def write(self, settled: Sequence[Settled]) -> None:
        sink = FileSink(self.place, self.index, form)
        sink.write(settled)
        sink.close()

    def seqs(self, path: Path | None = None) -> list[int]:
        data = (path or self.place.output).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return [json.loads(line)["seq"] for line in data.splitlines()]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    made = Output(tmp_path)
    yield made
    made.index.close()


@pytest.mark.parametrize("torn", [b'{"seq": 9', b'{"seq": 9}\n{"se', b'{"seq": 9}\n'])
def test_what_the_index_does_not_know_is_cut_off(output: Output, torn: bytes) -> None:
    output.write([done(3), done(1)])
    with output.place.partial.open("ab") as file:
        file.write(torn)
    output.write([done(9)])
    assert output.seqs(output.place.partial) == [3, 1, 9]


def test_a_line_is_written_once(output: Output) -> None:
    output.write([done(1), done(1)])
    output.write([done(1), done(2)])
    assert output.seqs(output.place.partial) == [1, 2]
    sink = FileSink(output.place, output.index, form)
    assert sink.counts() == {"succeeded": 2}
    assert sink.written([0, 1, 2]) == {1, 2}
    sink.close()


def test_a_partial_file_that_was_changed_is_refused(output: Output) -> None:
    output.write([done(1), done(2)])
    os.truncate(output.place.partial, 5)
    with pytest.raises(BulkRunConflict, match="--restart"):
        FileSink(output.place, output.index, form)


def test_a_full_disk_records_nothing(output: Output, tmp_path: Path) -> None:
    output.write([done(1)])
    sink = FileSink(output.place, output.index, form)
    os.close(sink._file.fileno())  # whatever is written now is refused
    with pytest.raises(BulkOutputFailed, match="cannot be written"):
        sink.write([done(2)])
    sink.close()
    assert output.index.written([1, 2]) == {1}


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_end_puts_lines_in_order_and_packs(
    tmp_path: Path, name: str, ordered: bool
) -> None:
    output = Output(tmp_path, name)
    written = [5, 2, 9, 0, 7]
    output.write([done(seq) for seq in written])
    finish(output.place, output.index, ordered=ordered)
    assert output.seqs() == (sorted(written) if ordered else written)
    assert (output.place.output.read_bytes()[:2] == b"\x1f\x8b") == name.endswith("gz")
    assert not output.place.partial.exists()
    output.index.close()


class Killed(BaseException):
    """What a test throws where a process is to die."""


def die(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("at", ["_rename", "_assemble", "sync_directory"])
def test_an_end_that_is_broken_off_is_made_good(
    output: Output, monkeypatch: pytest.MonkeyPatch, at: str, ordered: bool
) -> None:
    output.write([done(seq) for seq in (3, 1, 2)])
    monkeypatch.setattr(finishing, at, die)
    with contextlib.suppress(Killed):  # without an order nothing is assembled
        finish(output.place, output.index, ordered=ordered)
    monkeypatch.undo()
    output.reopen()
    if output.index.fact("phase", str) != finishing.FINISHED:
        finish(output.place, output.index, ordered=ordered)
    assert output.seqs() == ([1, 2, 3] if ordered else [3, 1, 2])
    assert not output.place.partial.exists()
    assert not output.place.assembled.exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_retry_keeps_all_but_what_failed(
    tmp_path: Path, name: str, ordered: bool
) -> None:
    output = Output(tmp_path, name)
    output.write([done(4), failed(2), refused(3), done(0), failed(1)])
    finish(output.place, output.index, ordered=ordered)
    assert prepare_retry(output.place, output.index, ordered=ordered) == 2
    kept = [0, 3, 4] if ordered else [4, 3, 0]
    assert output.seqs(output.place.partial) == kept
    assert output.seqs()  # the old one stays until there is a new one
    assert output.index.generations(range(5)) == {1: 1, 2: 1}
    assert output.index.replaced(range(5)) == {1: "failed", 2: "failed"}
    output.write([done(2), failed(1)])
    finish(output.place, output.index, ordered=ordered)
    assert output.seqs() == ([0, 1, 2, 3, 4] if ordered else [*kept, 2, 1])
    prepare_retry(output.place, output.index, ordered=ordered)
    assert output.index.generations(range(5)) == {1: 2, 2: 1}
    output.write([done(1)])
    finish(output.place, output.index, ordered=ordered)
    assert prepare_retry(output.place, output.index, ordered=ordered) == 0
    output.index.close()


@pytest.mark.parametrize("at", ["_take_remade", "sync_directory"])
def test_a_retry_that_is_broken_off_is_made_good(
    output: Output, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    output.write([done(0), failed(1), done(2)])
    finish(output.place, output.index, ordered=False)
    monkeypatch.setattr(finishing, at, die)
    with pytest.raises(Killed):
        prepare_retry(output.place, output.index, ordered=False)
    monkeypatch.undo()
    output.reopen()
    output.write([done(1)])
    assert output.seqs(output.place.partial) == [0, 2, 1]


def test_a_retry_of_a_changed_output_changes_nothing(output: Output) -> None:
    output.write([done(0), failed(1)])
    finish(output.place, output.index, ordered=False)
    output.place.output.write_bytes(b"{}\n")
    with pytest.raises(BulkRunConflict, match="was changed"):
        prepare_retry(output.place, output.index, ordered=False)
    assert output.index.counts() == {"succeeded": 1, "failed": 1}
    assert output.index.fact("phase", str) == finishing.FINISHED


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("prompt_too_long", "unfit"),
        ("control_tokens_in_text", "unfit"),
        ("input_unreadable", "failed"),
        ("internal_error", "failed"),
        ("deadline_exceeded", "failed"),
        ("of another version", "failed"),
    ],
)
def test_what_would_fail_again_is_not_tried_again(
    output: Output, code: str, state: str
) -> None:
    item = fed(0).item
    outcome = msgspec.structs.replace(
        succeed(item), state="failed", error=JobError(code, "no")
    )
    output.write([Done(fed=fed(0), outcome=outcome), done(1)])
    assert output.index.counts() == {state: 1, "succeeded": 1}
    finish(output.place, output.index, ordered=False)
    again = prepare_retry(output.place, output.index, ordered=False)
    assert again == (state == "failed")


def test_ids_that_come_twice_are_found_on_disk(output: Output) -> None:
    assert output.index.claim([(0, "a"), (1, "b"), (2, "a")]) == {2: 0}
    output.reopen()
    assert output.index.claim([(0, "a"), (5, "b")]) == {5: 1}


def test_one_lock_at_a_time_and_none_after_death(output: Output) -> None:
    held = Lock(output.place)
    with pytest.raises(BulkRunConflict, match="another command"):
        Lock(output.place)
    held.__exit__()
    with Lock(output.place):
        pass


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    take: Callable[[Lock, Place], None] = Lock._take
    removed: list[Path] = []

    def remove_then_take(lock: Lock, place: Place) -> None:
        if not removed:  # whoever had it left, and took its directory along
            removed.append(place.sidecar / Lock.NAME)
            removed[0].unlink()
        take(lock, place)

    monkeypatch.setattr(place_module.Lock, "_take", remove_then_take)
    with Lock(output.place):
        assert removed[0].exists()


def test_a_damaged_index_is_refused(output: Output) -> None:
    output.index.close()
    output.place.index.write_bytes(b"no database" * 1000)
    with pytest.raises(BulkRunConflict, match="damaged or not an index"):
        Index(output.place.index)
    output.place.index.unlink()
    output.index = Index(output.place.index)
    output.index.set_facts(format=99)
    with pytest.raises(BulkRunConflict, match="format 99"):
        Index(output.place.index)
