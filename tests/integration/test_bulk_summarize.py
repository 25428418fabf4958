"""`tokenmill bulk summarize`: documents of every kind, against a real bulk_pool."""

import gzip
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from support.bulk_pool import BulkPool, read_lines, write_lines

pytest_plugins = "support.bulk_fixture"

PEPS = Path(__file__).parents[2] / "bench" / "data" / "peps.jsonl.gz"
PARAGRAPH = (
    "The mill stands by the river. Its wheel turns all day and most of the night. "
    "Grain comes in by the cart, and flour goes out in sacks. "
)


def test_forty_documents_are_summarized_by_key_sentences(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    ran = bulk_pool.summarize(
        PEPS, "-o", output, "--mode", "extractive", "--max-words", 50, "--ordered"
    )
    assert ran.code == 0, ran.err
    with gzip.open(PEPS, "rt") as file:
        documents = [json.loads(line) for line in file]
    rows = read_lines(output)
    assert [row["id"] for row in rows] == [document["id"] for document in documents]
    for row, document in zip(rows, documents, strict=True):
        assert row["title"] == document["title"]
        assert 0 < len(row["summary"].split()) <= 50
        assert row["mode"] == "extractive"
        # Key sentences are the document's own.
        own = set(document["text"].split())
        assert own.issuperset(row["summary"].split()[:5])


def test_every_character_lies_in_a_window_and_the_tree_is_kept(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    text = "\n\n".join(f"Part {n}. {PARAGRAPH * 2}" for n in range(30))
    source = write_lines(
        tmp_path / "in.jsonl",
        [{"id": 1, "title": "Mills", "text": text}, {"id": 2, "text": "One line."}],
    )
    ran = bulk_pool.summarize(
        *(source, "-o", tmp_path / "out.jsonl", "--keep-tree", "--ordered"),
        *("--window-tokens", 256, "--overlap-tokens", 32, "--max-words", 40),
    )
    assert ran.code == 0, ran.err
    long, short = read_lines(tmp_path / "out.jsonl")
    assert (long["id"], long["title"], short["id"]) == (1, "Mills", 2)
    assert long["levels"] > 1
    assert short["windows"] == short["levels"] == 1
    leaves = [node for node in long["tree"] if node.get("level", 0) == 0]
    assert len(long["tree"]) > len(leaves) == long["windows"] > 3
    covered = set()
    for start, end in itertools.chain.from_iterable(leaf["spans"] for leaf in leaves):
        covered.update(range(start, end))
    missing = [at for at, letter in enumerate(text) if at not in covered]
    assert not "".join(text[at] for at in missing).strip()
    jobs = {node["job_id"] for node in long["tree"]}
    assert len(jobs) == len(long["tree"])
    assert 0 < len(long["summary"].split()) <= 40


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    files = {
        "a.txt": PARAGRAPH * 3,
        "b/notes.md": f"---\ntags: x\n---\n# A [mill](https://m.example)\n\n{PARAGRAPH}",
        "b/page.html": (
            "<html><head><title>Two mills</title><script>no()</script></head>"
            f"<body><h1>Mills</h1><p>{PARAGRAPH}</p></body></html>"
        ),
        "c/empty.txt": " \n",
        ".hidden/d.txt": "never",
        "e.csv": "1,2",
    }
    root = tmp_path / "documents"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "c" / "latin.txt").write_bytes("M\xfchle am Flu\xdf.".encode("latin-1"))
    (root / "c" / "packed.txt.gz").write_bytes(gzip.compress(PARAGRAPH.encode()))
    return root


def test_a_directory_is_read_to_its_leaves(
    bulk_pool: BulkPool, tmp_path: Path, directory: Path
) -> None:
    output = tmp_path / "out.jsonl"
    args = (directory, "-o", output, "--mode", "extractive", "--ordered")
    ran = bulk_pool.summarize(*args)
    assert ran.code == 3
    assert "2 files of other kinds were passed over" in ran.err
    rows: list[dict[str, Any]] = read_lines(output)
    assert [row["id"] for row in rows] == [
        *("a.txt", "b/notes.md", "b/page.html"),
        *("c/empty.txt", "c/latin.txt", "c/packed.txt.gz"),
    ]
    wrong = {row["id"]: row["error"] for row in rows if "error" in row}
    assert wrong.keys() == {"c/empty.txt", "c/latin.txt"}
    assert "0xfc, which is not UTF-8" in wrong["c/latin.txt"]["message"]
    titles = {row["id"]: row.get("title") for row in rows}
    assert titles["b/notes.md"] == "A mill"
    assert titles["b/page.html"] == "Two mills"
    for row in rows:
        assert "no()" not in row.get("summary", "")
        assert "tags" not in row.get("summary", "")
    (directory / "a.txt").write_text("Another text.")
    changed = bulk_pool.summarize(*args)
    assert changed.code == 18
    assert "the input was" in changed.err
    shutil.rmtree(directory)
    assert bulk_pool.summarize(*args).code == 4


def test_documents_that_are_wrong_fail_alone(
    bulk_pool: BulkPool, tmp_path: Path
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": "a", "text": PARAGRAPH},
            {"id": "b", "text": 7},
            {"id": "c", "title": 7, "text": "x"},
            {"text": "x"},
            b'{"id": "d", "text": "\\ud800"}',
            {"id": "a", "text": "again"},
        ],
    )
    ran = bulk_pool.summarize(
        source, "-o", tmp_path / "out.jsonl", "--mode", "extractive"
    )
    assert ran.code == 3
    rows = read_lines(tmp_path / "out.jsonl")
    fields = {row["error"]["line"]: row["error"]["field"] for row in rows[:-1]}
    assert fields == {2: "text", 3: "title", 4: "id", 5: "line", 6: "id"}
    assert rows[-1]["id"] == "a"
    with pytest.raises(typer.BadParameter, match="half of a window"):
        bulk_pool.summarize(
            source, "-o", "x", "--window-tokens", 100, "--overlap-tokens", 51
        )
