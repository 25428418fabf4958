"""`tokenmill bulk run`: files of requests in both forms, against a real bulk_pool."""

import json
from pathlib import Path

import pytest
from support.bulk_late import Late
from support.bulk_pool import (
    BulkPool,
    assert_answered,
    read_lines,
    request,
    write_lines,
)
from support.plain_adapters import save_plain_adapter

from tokenmill import SyncClient

pytest_plugins = "support.bulk_fixture"

CHAT = {
    "custom_id": "chat",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "echo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
    },
}
COMPLETION = {
    "custom_id": "text",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "echo", "prompt": "hello there", "max_tokens": 5},
}


def test_both_forms_are_answered_in_kind(bulk_pool: BulkPool, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [CHAT, COMPLETION, request(7), request(8, n=2)]
    )
    ran = bulk_pool.run(source, "-o", tmp_path / "out.jsonl", "--ordered")
    assert ran.code == 0, ran.err
    chat, completion, simple, choices = read_lines(tmp_path / "out.jsonl")
    assert (chat["custom_id"], chat["error"]) == ("chat", None)
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "user: hi",
        "refusal": None,
    }
    assert body["usage"]["completion_tokens"] == 8
    body = completion["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "hello")
    assert simple["id"] == 7
    assert (simple["text"], simple["finish_reason"]) == ("000007", "length")
    assert [choice["text"] for choice in choices["choices"]] == ["000008", "000008"]


def test_a_bad_line_is_an_error_line_and_the_file_goes_on(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    unsupported = {**CHAT, "custom_id": "tools"}
    unsupported["body"] = {**CHAT["body"], "tools": [{"type": "function"}]}
    bad = {
        2: (b"{broken", "line", None),
        4: ({"id": "no prompt"}, "prompt", "no prompt"),
        5: (b'{"id": "\xff", "prompt": "a"}', "line", None),
        6: ({"id": 0, "prompt": "again"}, "id", 0),
        7: (unsupported, "tools", "tools"),
        8: (request(1, tempratur=1), "options.tempratur", 1),
        9: ({"id": "long", "prompt": "x" * 5_000_000}, "prompt", "long"),
        10: ({"id": "m", "prompt": "a", "options": {"model": "none"}}, None, "m"),
        11: (request(2, temperature=9), "options.temperature", 2),
    }
    lines: list[object] = [request(0), *(line for line, _, _ in bad.values())]
    lines.insert(2, b"")  # a blank line is no item, and counts as a line
    source = write_lines(tmp_path / "in.jsonl", [*lines, request(9)])
    ran = bulk_pool.run(source, "-o", tmp_path / "out.jsonl", "--json")
    assert ran.code == 3
    assert json.loads(ran.err.splitlines()[-1])["error"]["code"] == "items_failed"
    assert ran.report["succeeded"] == 2
    assert ran.report["refused"] == len(bad)
    rows = read_lines(tmp_path / "out.jsonl")
    assert sorted(row["text"] for row in rows if "text" in row) == ["000000", "000009"]
    wrong = {row["error"]["line"]: row for row in rows if row.get("error")}
    assert wrong.keys() == bad.keys()
    for number, (_, field, name) in bad.items():
        row = wrong[number]
        assert row.get("id") == name or row.get("custom_id") == name
        found = row["error"].get("field") or row["error"].get("param")
        assert found == (field or "options.model"), row
    assert wrong[7]["response"]["status_code"] == 400


def test_gzip_and_standard_streams(bulk_pool: BulkPool, tmp_path: Path) -> None:
    requests = [request(number) for number in range(50)]
    packed = write_lines(tmp_path / "in.gz", requests)
    odd_name = packed.rename(tmp_path / "in.data")  # gzip is told by its first bytes
    assert bulk_pool.run(odd_name, "-o", tmp_path / "out.jsonl.gz").code == 0
    assert (tmp_path / "out.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert_answered(tmp_path / "out.jsonl.gz", 50)
    given = odd_name.read_bytes()
    args = ("run", "-", "--model", "echo", "--quiet", "-o")
    piped = bulk_pool.process(*args, "-", given=given)
    assert piped.code == 0, piped.err
    (tmp_path / "piped").write_text(piped.out)
    assert_answered(tmp_path / "piped", 50)
    ordered = bulk_pool.process(*args, "-", "--ordered", given=given)
    ids = [json.loads(line)["id"] for line in ordered.out.splitlines()]
    assert ids == list(range(50))
    assert bulk_pool.process(*args, tmp_path / "kept.jsonl", given=given).code == 0
    assert_answered(tmp_path / "kept.jsonl", 50)
    nothing = bulk_pool.process(*args, tmp_path / "kept.jsonl", given=b"")
    assert nothing.code == 18, nothing.err
    assert "0 bytes" in nothing.err


def test_damaged_gzip_ends_the_file_where_it_breaks(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.gz", [request(n) for n in range(4000)])
    source.write_bytes(source.read_bytes()[:-1000])
    ran = bulk_pool.run(source, "-o", tmp_path / "out.jsonl", "--tenant", "damaged")
    assert ran.code == 4
    assert "cannot be read beyond line" in ran.err
    assert "--restart" in ran.err
    partial = read_lines(tmp_path / "out.jsonl.partial")
    assert len({row["id"] for row in partial}) == len(partial) > 1000


def test_the_same_command_again_says_that_all_is_done(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0), request(1)])
    output = tmp_path / "out.jsonl"
    first = bulk_pool.run(source, "-o", output, "--json")
    written = output.read_bytes()
    again = bulk_pool.run(source, "-o", output, "--json")
    assert (first.code, again.code) == (0, 0)
    assert again.report["run"] == first.report["run"]
    assert "complete before" in bulk_pool.run(source, "-o", output).err
    assert output.read_bytes() == written
    assert not output.with_name("out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tenant", "other"), "tenant was 'default' and is 'other'"),
        (("--ordered",), "ordered was False and is True"),
    ],
)
def test_other_options_are_refused_by_name(
    bulk_pool: BulkPool, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    output = tmp_path / "out.jsonl"
    bulk_pool.run(source, "-o", output)
    ran = bulk_pool.run(source, "-o", output, *options)
    assert ran.code == 18
    assert said in ran.err
    assert "--restart" in ran.err
    assert bulk_pool.run(source, "-o", output, *options, "--restart").code == 0


def test_the_only_model_of_a_pool_is_meant_where_none_is_named(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0), request(1)])
    output = tmp_path / "out.jsonl"
    again = ("run", source, "-o", output, "--quiet")
    assert bulk_pool.bulk(*again).code == 0
    assert [line["model"] for line in read_lines(output)] == ["echo", "echo"]
    assert (
        bulk_pool.bulk(*again).code == 0
    )  # it is the same run, with its model or without
    assert bulk_pool.run(source, "-o", output).code == 0
    other = bulk_pool.bulk(*again, "--model", "other")
    assert (other.code, "model was 'echo' and is 'other'" in other.err) == (18, True)
    document = tmp_path / "text.txt"
    document.write_text("The mill turns. It grinds.", encoding="utf-8")
    ran = bulk_pool.bulk("summarize", document, "-o", tmp_path / "s.jsonl", "--quiet")
    assert ran.code == 0, ran.err


def test_a_run_of_an_adapter(bulk_pool: BulkPool, tmp_path: Path) -> None:
    with SyncClient(bulk_pool.url) as mill:
        for name in ("tone", "other"):
            path = save_plain_adapter(tmp_path / name)
            mill.add_adapter(name, path, model="echo")
    lines = [
        {"id": number, "prompt": "a b", "options": {"max_tokens": 12, **more}}
        for number, more in enumerate(
            ({}, {"adapter": "other"}, {"adapter": None}, {"model": "echo"})
        )
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    again = ("run", source, "-o", output, "--model", "echo:tone", "--quiet")
    ran = bulk_pool.bulk(*again)
    assert ran.code == 0, ran.err
    texts = {row["id"]: row["text"] for row in read_lines(output)}
    assert texts == {0: "tone: a b", 1: "other: a b", 2: "a b", 3: "a b"}
    document = tmp_path / "text.txt"
    document.write_text("The mill turns. It grinds.", encoding="utf-8")
    summarize = ("summarize", document, "--quiet", "--model")
    ran = bulk_pool.bulk(*summarize, "echo:tone", "-o", tmp_path / "s.jsonl")
    assert ran.code == 0, ran.err
    (summary,) = read_lines(tmp_path / "s.jsonl")
    assert summary["summary"].startswith("tone: ")
    for number, words in enumerate((("run", source, "--quiet", "--model"), summarize)):
        place = tmp_path / f"{number}.jsonl"
        ran = bulk_pool.bulk(*words, "echo:gone", "-o", place)
        assert (ran.code, "it has other, tone" in ran.err) == (4, True), ran.err
        assert not place.exists()
    with SyncClient(bulk_pool.url) as mill:
        for name in ("tone", "other"):
            mill.remove_adapter(name, model="echo")
    assert bulk_pool.bulk(*again).code == 0  # what is done outlives its adapter


def test_a_changed_input_and_a_strange_output_are_refused(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    output = tmp_path / "out.jsonl"
    bulk_pool.run(source, "-o", output)
    write_lines(source, [request(1)])
    ran = bulk_pool.run(source, "-o", output)
    assert ran.code == 18
    assert "the input was of" in ran.err
    write_lines(source, [request(0)])  # the time of change alone is no change
    assert bulk_pool.run(source, "-o", output).code == 0
    strange = write_lines(tmp_path / "strange.jsonl", [])
    ran = bulk_pool.run(source, "-o", strange)
    assert ran.code == 18
    assert "nothing says how it was made" in ran.err
    assert not (tmp_path / "strange.jsonl.run").exists()


def test_a_second_command_on_one_output_is_refused(
    bulk_pool: BulkPool, late: Late, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", late.lines(300))
    output = tmp_path / "out.jsonl"
    first = bulk_pool.start("run", source, "-o", output, "--model", "echo", "--json")
    assert first.stdout is not None
    first.stdout.readline()  # it has begun, and its first progress is there
    second = bulk_pool.run(source, "-o", output)
    assert second.code == 18
    assert "another command is writing" in second.err
    late.serve()
    assert first.wait(120) == 0
    first.stdout.close()
    assert first.stderr is not None
    first.stderr.close()
    assert_answered(output, 300)


def test_what_the_pool_refuses_is_not_begun(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(0)])
    ran = bulk_pool.run(source, "-o", tmp_path / "out.jsonl", "--tenant", "a b")
    assert ran.code == 4
    assert "tenant" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert (
        bulk_pool.run(source, "-o", tmp_path / "out.jsonl", "--tenant", "ab").code == 0
    )
    unwritable = bulk_pool.run(source, "-o", tmp_path / "none" / "out.jsonl")
    assert unwritable.code == 74
    assert bulk_pool.run(tmp_path / "none", "-o", tmp_path / "o.jsonl").code == 4
