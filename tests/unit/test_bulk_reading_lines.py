"""Lines of an input: bounded, numbered, packed or not."""

import gzip
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from support.waiting import wait_until_sync

from tokenmill.producer.bulk.identity import identify
from tokenmill.producer.bulk.reading import RawLine, read_lines
from tokenmill.shared.errors import InputUnreadable, InvalidRequest


def lines(path: Path, data: bytes, most: int = 100) -> list[RawLine]:
    path.write_bytes(data)
    return list(read_lines(path, most))


def test_lines_are_numbered_and_blank_ones_are_none(tmp_path: Path) -> None:
    found = lines(tmp_path / "in", b"\xef\xbb\xbfa\n\n  \r\n b\r\nlast")
    assert [(line.number, line.data) for line in found] == [
        (1, b"a"),
        (4, b"b"),
        (5, b"last"),
    ]


@pytest.mark.parametrize("size", [99, 100, 101, 102, 1000, 100_000])
def test_a_long_line_is_passed_over_and_measured(tmp_path: Path, size: int) -> None:
    found = lines(tmp_path / "in", b"a\n" + b"x" * size + b"\nb\n")
    assert [line.number for line in found] == [1, 2, 3]
    assert found[1].length == size + 1
    assert len(found[1].data) == (size if size <= 100 else 0)
    assert found[2].data == b"b"


def test_gzip_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    data = gzip.compress(b"a\nb\n") + gzip.compress(b"c\n")
    found = lines(tmp_path / "in.jsonl", data)
    assert [line.data for line in found] == [b"a", b"b", b"c"]
    assert [line.data for line in lines(tmp_path / "x.gz", b"plain\n")] == [b"plain"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("data", [b"\n" * 100_000, b"x" * 30_000_000])
def test_a_reading_can_be_stopped_where_it_yields_nothing(
    tmp_path: Path, data: bytes, packed: bool
) -> None:
    path = tmp_path / "in"
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    told: list[tuple[int, int]] = []

    def watch(num_lines: int, num_bytes: int) -> None:
        told.append((num_lines, num_bytes))
        if len(told) == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        list(read_lines(path, 1000, watch=watch))
    assert told[-1][1] < len(data) / 2


def test_the_end_of_a_reading_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n\nb")
    told: list[tuple[int, int]] = []
    found = list(read_lines(path, 100, watch=lambda *at: told.append(at)))
    assert len(found) == 2
    assert told == [(3, 4)]


def test_a_damaged_file_gives_what_comes_before(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b"%d\n" % n for n in range(20_000)))
    path = tmp_path / "in.gz"
    path.write_bytes(packed[:-500])
    seen: list[RawLine] = []
    with pytest.raises(InputUnreadable, match="beyond line"):
        seen.extend(read_lines(path, 100))
    assert len(seen) > 1000
    with pytest.raises(InvalidRequest, match="No such file"):
        list(read_lines(tmp_path / "none", 100))


def wait_for_the_next_tick(path: Path) -> None:
    """Until a write shows in the times that a file system keeps, some milliseconds."""
    was, probe = path.stat().st_ctime_ns, path.with_name(".probe")

    def is_later() -> bool:
        probe.touch()
        return probe.stat().st_ctime_ns > was

    wait_until_sync(is_later)


def test_an_input_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n\nb\n")
    first = identify(path, None, max_line=100)
    assert first.items == 2
    assert identify(path, first, max_line=100) is first
    wait_for_the_next_tick(path)
    path.write_bytes(b"a\n\nb\n")
    same = identify(path, first, max_line=100)
    assert same.is_same(first)
    assert same.stamp != first.stamp
    wait_for_the_next_tick(path)
    path.write_bytes(b"a\n\nc\n")
    assert not identify(path, first, max_line=100).is_same(first)
    path.write_bytes(gzip.compress(b"a\n" * 9)[:-9])
    assert identify(path, None, max_line=100).items is None


@pytest.mark.parametrize("change", ["moved", "copied", "written"])
def test_another_content_of_the_same_size_and_time_is_noticed(
    tmp_path: Path, change: str
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"old")
    path, new = tmp_path / "b.txt", tmp_path.with_name("new")
    one, all_of = (identify(where, None, max_line=None) for where in (path, tmp_path))
    was = path.stat()
    wait_for_the_next_tick(path)
    if change == "moved":
        new.write_bytes(b"new")
        os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
        new.replace(path)
    elif change == "copied":
        new.write_bytes(b"new")
        os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
        shutil.copy2(new, path)
    else:
        path.write_bytes(b"new")
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_mtime_ns == was.st_mtime_ns
    assert not identify(path, one, max_line=None).is_same(one)
    assert not identify(tmp_path, all_of, max_line=None).is_same(all_of)


def test_the_same_content_in_another_file_is_the_same_input(tmp_path: Path) -> None:
    path, new = tmp_path / "in", tmp_path / "new"
    path.write_bytes(b"a\n")
    first = identify(path, None, max_line=100)
    by_the_version_before = msgspec.structs.replace(first, stamp="of another form")
    new.write_bytes(b"a\n")
    new.replace(path)
    for known in (first, by_the_version_before):
        found = identify(path, known, max_line=100)
        assert found.is_same(first)
        assert found.stamp != known.stamp
