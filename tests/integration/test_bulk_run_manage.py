"""`tokenmill bulk status`, `list`, `cancel` and `retry-failed`, against a real pool."""

import json
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
from tokenmill.shared.bulk.keys import RunKeys

pytest_plugins = "support.bulk_fixture"

TOO_LONG = {"id": "long", "prompt": "x" * 999_998, "options": {"max_tokens": 6}}
"""What only the scheduler can tell, since it depends on the exact number of tokens."""


def test_a_run_is_found_by_its_id_and_by_its_output(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(n) for n in range(5)])
    output = tmp_path / "out.jsonl"
    ran = bulk_pool.run(source, "-o", output, "--name", "nightly", "--json")
    run = ran.report["run"]
    by_id = json.loads(bulk_pool.bulk("status", run, "--json").out)
    by_output = json.loads(bulk_pool.bulk("status", output, "--json").out)
    assert by_id["run"] == by_output["run"] == run
    assert by_id["state"] == "complete"
    assert (by_id["total"], by_id["succeeded"], by_id["acknowledged"]) == (5, 5, 5)
    shown = bulk_pool.bulk("status", output).out
    assert "nightly" in shown
    assert str(source) in shown
    listed = bulk_pool.bulk("list")
    assert run in listed.out
    assert bulk_pool.bulk("list", "--limit", 1, "--json").out.count("\n") == 1
    missing = bulk_pool.bulk("status", tmp_path / "none")
    assert missing.code == 8
    assert bulk_pool.bulk("status", "aaaaaaaaaa").code == 8


def test_nothing_of_an_ended_run_but_its_record_is_left(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(n) for n in range(300)])
    ran = bulk_pool.run(source, "-o", tmp_path / "out.jsonl", "--json")
    keys = RunKeys(ran.report["run"])
    left = {name.decode() for name in bulk_pool.redis.keys(f"{keys.prefix}*")}
    assert left <= {keys.record, keys.out}
    assert bulk_pool.redis.xlen(keys.out) == 0
    assert all(0 < bulk_pool.redis.ttl(name) <= 604_800 for name in left)


def test_what_failed_is_run_again_and_the_rest_stays(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    lines = [request(0), TOO_LONG, b"{broken", request(1)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    ran = bulk_pool.run(source, "-o", output, "--json", "--ordered")
    assert ran.code == 3
    assert (ran.report["failed"], ran.report["refused"]) == (0, 2)
    assert "retry-failed" not in ran.err  # which would never help
    index = Index(Place(output).index)
    index._db.execute("UPDATE lines SET state = 'failed' WHERE seq = 1")
    index.close()
    jobs = ran.report["jobs"]
    before = read_lines(output)
    assert before[1]["error"]["code"] == "prompt_too_long"
    again = bulk_pool.bulk("retry-failed", output, "--json")
    assert again.code == 3
    assert again.report["run"] == ran.report["run"]
    assert again.report["jobs"] == jobs + 1
    after = read_lines(output)
    assert after[0] == before[0]
    assert after[2:] == before[2:]
    assert after[1]["error"]["code"] == "prompt_too_long"
    by_run = bulk_pool.bulk("retry-failed", ran.report["run"], "--json")
    assert by_run.report["refused"] == 2
    assert by_run.report["jobs"] == 0  # there is nothing that might go better
    write_lines(source, [request(0), request(2)])
    changed = bulk_pool.bulk("retry-failed", output)
    assert changed.code == 18
    assert read_lines(output) == after
    assert bulk_pool.bulk("retry-failed", source).code == 18


def test_a_cancelled_run_leaves_and_can_go_on(
    bulk_pool: BulkPool, late: Late, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", late.lines(300))
    output = tmp_path / "out.jsonl"
    process = bulk_pool.start("run", source, "-o", output, "--model", "echo", "--json")
    assert process.stdout is not None
    progress = json.loads(process.stdout.readline())["progress"]
    partial_file = tmp_path / "out.jsonl.partial"
    wait_until_sync(lambda: partial_file.exists() and partial_file.stat().st_size > 0)
    cancelled = bulk_pool.bulk("cancel", output)
    assert cancelled.out.strip() in ("cancelling", "cancelled")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 10, err
    report = json.loads(out.splitlines()[-1])["report"]
    assert (report["run"], report["state"]) == (progress["run"], "cancelled")
    partial = read_lines(partial_file)
    assert 0 < len(partial) == report["succeeded"] < 300
    assert not output.exists()
    late.serve()
    again = bulk_pool.run(source, "-o", output, "--json")
    assert again.code == 0, again.err
    assert again.report["run"] == progress["run"]
    assert_answered(output, 300)
