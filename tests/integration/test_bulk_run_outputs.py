"""What becomes of outputs: gone, replaced, broken off, cancelled and tried again."""

import json
import os
import signal
from pathlib import Path

from support.bulk_late import Late
from support.bulk_pool import (
    BulkPool,
    assert_answered,
    read_lines,
    request,
    write_lines,
)
from support.waiting import wait_until_sync

from tokenmill.producer.bulk.index import Index
from tokenmill.producer.bulk.place import Place

pytest_plugins = "support.bulk_fixture"


LINES = 300


def begun(bulk_pool: BulkPool, late: Late, output: Path) -> int:
    """Starts a run and interrupts it once some lines are written; returns its code."""
    source = write_lines(output.with_name("in.jsonl"), late.lines(LINES))
    process = bulk_pool.start("run", source, "-o", output, "--model", "echo", "--json")
    assert process.stdout is not None
    process.stdout.readline()  # it has begun, and its first progress is there
    partial = Place(output).partial
    wait_until_sync(lambda: partial.exists() and partial.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    return process.returncode


def test_an_interrupted_run_is_left_and_its_retry_does_the_rest(
    bulk_pool: BulkPool, late: Late, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    assert begun(bulk_pool, late, output) == 130
    # What was on its way as it left may reach Redis after its farewell: then it is
    # missed a little later.
    wait_until_sync(
        lambda: "give its command again" in bulk_pool.bulk("status", output).out,
        every_s=0.2,
        what="word that its driver is gone",
    )
    assert not output.exists()
    late.serve()
    again = bulk_pool.bulk("retry-failed", output, "--json")
    assert again.code == 0, again.err
    assert again.report["total"] == LINES
    assert_answered(output, LINES)


def test_a_retry_after_an_interrupted_retry_goes_on(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(n) for n in range(3)])
    output = tmp_path / "out.jsonl"
    assert bulk_pool.run(source, "-o", output).code == 0
    index = Index(Place(output).index)
    index._db.execute("UPDATE lines SET state = 'failed' WHERE seq = 1")
    index.close()
    nowhere = bulk_pool.process(  # prepared, and then the pool does not answer
        *("retry-failed", output, "--patience", 0.1, "--url", "redis://127.0.0.1:1")
    )
    assert nowhere.code == 3, nowhere.err
    again = bulk_pool.bulk("retry-failed", output, "--json")
    assert again.code == 0
    assert again.report["succeeded"] == 3
    assert_answered(output, 3)


def test_a_cancelled_run_is_no_success_of_a_retry(
    bulk_pool: BulkPool, late: Late, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    begun(bulk_pool, late, output)
    assert bulk_pool.bulk("cancel", output).code == 0
    late.serve()
    again = bulk_pool.bulk("retry-failed", output, "--json")
    assert again.code == 0, again.err
    assert_answered(output, LINES)


def test_a_finished_output_that_is_gone_is_no_success(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    output = tmp_path / "out.jsonl"
    assert bulk_pool.run(source, "-o", output).code == 0
    output.unlink()
    for ran in (
        bulk_pool.run(source, "-o", output),
        bulk_pool.bulk("retry-failed", output),
    ):
        assert ran.code == 18
        assert "is gone" in ran.err
    assert bulk_pool.run(source, "-o", output, "--restart").code == 0
    assert_answered(output, 1)


def test_a_restart_ends_the_run_that_it_replaces(
    bulk_pool: BulkPool, late: Late, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    begun(bulk_pool, late, output)
    old = json.loads(bulk_pool.bulk("status", output, "--json").out)["run"]
    few = write_lines(tmp_path / "few.jsonl", [request(0)])
    assert bulk_pool.run(few, "-o", output, "--restart").code == 0
    state = json.loads(bulk_pool.bulk("status", old, "--json").out)["state"]
    assert state in ("cancelling", "cancelled")


def test_no_option_makes_the_input_an_output(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    given = source.read_bytes()
    for output in (source, tmp_path, ".", "/dev/null"):
        for more in ((), ("--restart",)):
            ran = bulk_pool.run(source, "-o", output, *more)
            assert ran.code == 4, ran.err
            assert "--restart" not in ran.err
    for paths in (("", "-o", tmp_path / "out.jsonl"), (source, "-o", "")):
        ran = bulk_pool.run(*paths)
        assert ran.code == 4, ran.err
        assert "the name is empty" in ran.err
    assert source.read_bytes() == given
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_pipe_among_documents_is_passed_over(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("One. Two. Three.")
    os.mkfifo(tmp_path / "docs" / "pipe.md")
    output = tmp_path / "out.jsonl"
    given = (tmp_path / "docs", "-o", output, "--mode", "extractive", "--json")
    ran = bulk_pool.summarize(*given)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out.splitlines()[-1])["passed_over"] == 1
    (row,) = read_lines(output)
    assert row["id"] == "a.txt"
    assert "source_tokens" not in row


def test_refused_lines_are_told_in_the_pool(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0), b"{", b"["])
    output = tmp_path / "out.jsonl"
    ran = bulk_pool.run(source, "-o", output)
    assert ran.code == 3, ran.err
    shown = bulk_pool.bulk("status", output).out
    assert "2 lines of the input" in shown
    run = json.loads(bulk_pool.bulk("status", output, "--json").out)["run"]
    listed = map(json.loads, bulk_pool.bulk("list", "--json").out.splitlines())
    assert [one["refused"] for one in listed if one["run"] == run] == [2]
