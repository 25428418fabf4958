"""What an output may be, and that nothing of anybody else's is touched."""

import os
import sqlite3
from pathlib import Path

import pytest
from support.fake_run import done

from tokenmill.producer.bulk.finding import run_named
from tokenmill.producer.bulk.flow import Settled
from tokenmill.producer.bulk.identity import Identity
from tokenmill.producer.bulk.index import Index
from tokenmill.producer.bulk.opening import begin, opened
from tokenmill.producer.bulk.place import Place
from tokenmill.producer.bulk.sink import FileSink
from tokenmill.producer.bulk.target import check_target
from tokenmill.shared.bulk.messages import RunSpec
from tokenmill.shared.errors import (
    BulkOutputFailed,
    BulkRunConflict,
    InvalidRequest,
)

SOURCE = Identity(size=1, digest="d", stamp="s")


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def started(place: Place, *, restart: bool = False) -> str:
    """Begins a run for an output, and leaves."""
    with opened(place, restart=restart) as index:
        spec = RunSpec(kind="run")
        return begin(
            place, index, spec=spec, ordered=False, source=SOURCE, restart=restart
        ).run


@pytest.mark.parametrize("restart", [False, True])
def test_a_directory_of_somebody_else_is_refused_and_stays(
    tmp_path: Path, restart: bool
) -> None:
    place = Place(tmp_path / "out.jsonl")
    place.sidecar.mkdir()
    for name in ("notes.txt", "input"):
        (place.sidecar / name).write_text("mine")
    with pytest.raises(BulkRunConflict, match=r"notes\.txt"):
        started(place, restart=restart)
    assert names_in(place.sidecar) == {"input", "notes.txt"}


@pytest.mark.parametrize("restart", [False, True])
def test_files_beside_our_index_stay(tmp_path: Path, restart: bool) -> None:
    place = Place(tmp_path / "out.jsonl")
    started(place)
    (place.sidecar / "notes.txt").write_text("mine")
    started(place, restart=restart)
    assert (place.sidecar / "notes.txt").read_text() == "mine"


def test_an_empty_directory_that_was_there_stays(tmp_path: Path) -> None:
    place = Place(tmp_path / "out.jsonl")
    place.sidecar.mkdir()
    with opened(place):
        pass
    assert names_in(place.sidecar) == set()
    place.sidecar.rmdir()
    with opened(place):
        pass
    assert not place.sidecar.exists()


def test_lines_that_no_index_knows_are_not_cut_away(tmp_path: Path) -> None:
    place = Place(tmp_path / "out.jsonl")
    place.partial.write_bytes(b"precious\n")
    with pytest.raises(BulkRunConflict, match=r"partial exists"):
        started(place)
    assert place.partial.read_bytes() == b"precious\n"
    assert not place.sidecar.exists()
    started(place, restart=True)
    assert not place.partial.exists()


def test_a_restart_remembers_the_run_that_it_forgets(tmp_path: Path) -> None:
    place = Place(tmp_path / "out.jsonl")
    first = started(place)
    with opened(place, restart=True) as index:  # leaves before it reaches the pool
        assert index.fact("replaced", str) == first
    with opened(place) as index:
        assert index.fact("replaced", str) == first


def test_what_is_no_file_is_never_an_output(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "same").hardlink_to(source)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to(tmp_path / "pipe")
    for name, why in (
        (".", "is a directory"),
        ("..", "is a directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "link", r"symbolic link.*in\.jsonl"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "to-pipe", "no regular file.*use -"),
        ("/dev/null", "no regular file"),
        ("/dev/stdout", "no regular file.*use -"),
        (source, "is the input itself"),
        (tmp_path / "same", "is the input itself"),
    ):
        with pytest.raises(InvalidRequest, match=why) as raised:
            check_target(Place(Path(name)), source)
        assert "--restart" not in str(raised.value)
    check_target(Place(tmp_path / "out.jsonl"), source)


def test_lines_so_far_that_are_the_input_are_no_output(tmp_path: Path) -> None:
    source = tmp_path / "out.jsonl.partial"
    source.write_text("{}\n")
    with pytest.raises(InvalidRequest, match="is the input itself"):
        check_target(Place(tmp_path / "out.jsonl"), source)


def test_a_document_of_the_input_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.md").write_text("x")
    with pytest.raises(InvalidRequest, match="read as a document"):
        check_target(Place(tmp_path / "a" / "b.md"), tmp_path)
    check_target(Place(tmp_path / "a" / "b.jsonl"), tmp_path)


def form(_: Settled) -> bytes:
    return b"x" * 4000


def test_a_full_disk_under_the_index_is_no_damage(tmp_path: Path) -> None:
    place = Place(tmp_path / "out.jsonl")
    place.make()
    index = Index(place.index)
    sink = FileSink(place, index, form)
    sink.write([done(0)])
    (pages,) = index._db.execute("PRAGMA page_count").fetchone()
    index._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(BulkOutputFailed, match="full"):
        sink.write([done(n) for n in range(1, 4000)])
    with pytest.raises(BulkOutputFailed, match="full"):
        index.claim([(n, f"id {n}") for n in range(4000)])
    index._db.execute("PRAGMA max_page_count=100000")
    assert index.written(range(10)) == {0}
    assert index.claim([(7, "id 7")]) == {}
    sink.close()
    index.close()


def test_a_run_is_found_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "out.jsonl")
    run = started(place)
    connect = sqlite3.connect

    def read_only(database: str, *, uri: bool) -> sqlite3.Connection:
        if "immutable" not in database:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(database, uri=uri)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert run_named(str(place.output)) == run
