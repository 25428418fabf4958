"""Inputs that are damaged, strange or hostile: one bad file is one error line."""

import asyncio
import codecs
import gzip
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.producer.bulk.documents import DocumentReader, FileSource, look_over
from tokenmill.producer.bulk.flow import Fed, Refused
from tokenmill.producer.bulk.identity import identify
from tokenmill.producer.bulk.index import Index
from tokenmill.producer.bulk.line_source import PART, LineSource
from tokenmill.producer.bulk.markup import read_markup
from tokenmill.producer.bulk.off_loop import Check, off_loop
from tokenmill.producer.bulk.reading import read_lines
from tokenmill.shared.errors import InputUnreadable, InvalidRequest


@pytest.fixture
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return Index(tmp_path_factory.mktemp("index") / "index.sqlite")


def damaged_gzip() -> bytes:
    data = bytearray(gzip.compress(os.urandom(5000)))
    data[20] ^= 0xFF
    data[11] = 0xFF  # no block of deflate begins so
    data[10] = 0xFF
    return bytes(data)


def test_each_bad_file_of_a_directory_is_one_error_line(
    tmp_path: Path, index: Index
) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt.gz").write_bytes(damaged_gzip())
    (tmp_path / "c.html").write_text("<![ foo [ bar")
    (tmp_path / "d.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "e.txt")
    (tmp_path / os.fsdecode(b"f\xff.txt")).write_text("good as well")
    source = identify(tmp_path, None, max_line=None)
    assert (source.items, source.others) == (5, 1)
    entries = list(FileSource(tmp_path, index).entries())
    refused = {e.custom_id: e.error for e in entries if isinstance(e, Refused)}
    assert refused.keys() == {"b.txt.gz", "c.html", "d.txt"}
    assert {error.field for error in refused.values()} == {"file", "text"}
    fed = [e.item.custom_id for e in entries if isinstance(e, Fed)]
    assert fed == ["a.txt", r"f\xff.txt"]
    assert [entry.seq for entry in entries] == list(range(5))


def test_each_name_of_a_file_is_an_id_of_its_own(tmp_path: Path, index: Index) -> None:
    names = [
        b"f\xfe.txt",
        b"f\xff.txt",
        rb"f\xff.txt",
        rb"f\\xff.txt",
        "fÿ.txt".encode(),
    ]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_text("good")
    entries = FileSource(tmp_path, index).entries()
    ids = [entry.item.custom_id for entry in entries if isinstance(entry, Fed)]
    assert len(set(ids)) == len(names)
    back = {codecs.escape_decode(text.encode())[0] for text in ids}
    assert back == set(names)


def test_a_dead_link_that_comes_to_life_is_another_input(tmp_path: Path) -> None:
    (tmp_path / "d.txt").symlink_to(tmp_path / "there")
    before = look_over(tmp_path)
    (tmp_path / "there").write_text("x")
    assert look_over(tmp_path).stamp != before.stamp


def test_a_pipe_is_no_input_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="standard input"):
        identify(tmp_path / "pipe", None, max_line=100)


def until_broken(things: Iterator[object]) -> tuple[int, str]:
    """How many come before it breaks, and what it says then."""
    count = 0
    try:
        for _ in things:
            count += 1
    except InputUnreadable as error:
        return count, str(error)
    raise AssertionError("did not break")


@pytest.mark.parametrize("before", [PART // 2, PART + 7])
def test_all_lines_before_damage_are_worked_off(
    tmp_path: Path, index: Index, before: int
) -> None:
    lines = [
        b'{"id": %d, "text": "%s"}' % (n, os.urandom(50).hex().encode())
        for n in range(before + 300)
    ]
    path = tmp_path / "in.gz"
    packed = gzip.compress(b"\n".join(lines))
    path.write_bytes(packed[: len(packed) * before // len(lines)])
    readable, why = until_broken(read_lines(path, 1000))
    assert readable % PART
    found, said = until_broken(LineSource(path, index, DocumentReader()).entries())
    assert (found, said) == (readable, why)
    assert f"beyond line {readable}" in said


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_another_encoding_is_told_once(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "in.jsonl"
    mark = "" if encoding == "utf-16" else "\ufeff"
    path.write_bytes((mark + '{"id": 1}\n{"id": 2}\n').encode(encoding))
    with pytest.raises(InvalidRequest, match=r"UTF-16.*iconv"):
        identify(path, None, max_line=1000)


@pytest.mark.parametrize(
    "part",
    [
        *("<!--", "[", "[a](", "![", "![a](", "[a]([", "# ", "# a ", "#\t \t", "`"),
        *("\n[", "\n[a]: ", "\n# ", " ", "\n ", "](", "---\n", "- ", "~~~", "[a](b("),
    ],
)
def test_no_text_takes_markdown_longer_than_its_length(part: str) -> None:
    text = "x\n" + part * (400_000 // len(part))
    began = time.process_time()
    read_markup(text.encode(), ".md")
    read_markup(("# " + text[2:]).encode(), ".md")
    assert time.process_time() - began < 2


def test_markdown_headings_and_addresses_of_all_kinds() -> None:
    page = "# C#\n\n## Two ##\n\n[a](b_(c)) ![i](j) [![k](l)](m) <!-- [x](y) -->n <!--"
    document = read_markup(page.encode(), ".md")
    assert document.title == "C#"
    assert document.text == "C#\n\nTwo\n\na i k n <!--"


async def test_work_on_a_file_leaves_the_loop_free_and_stops_when_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(check: Check) -> None:
        begun.set()
        try:
            while True:
                check()
                ended.wait(0.001)
        finally:
            ended.set()

    task = asyncio.create_task(off_loop(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert await off_loop(lambda check: 7) == 7
