"""Files as documents: text, Markdown, HTML, and which files of a directory count."""

from pathlib import Path

import pytest

from tokenmill.producer.bulk import documents
from tokenmill.producer.bulk.documents import DocumentReader, document_files, is_lines
from tokenmill.producer.bulk.markup import read_markup
from tokenmill.shared.bulk.messages import Document
from tokenmill.shared.errors import InvalidRequest, PayloadTooLarge


def read(text: str, suffix: str) -> Document:
    return read_markup(text.encode(), suffix)


def test_html_is_what_a_person_reads() -> None:
    page = read(
        """<!DOCTYPE html><html><head><title> A  page </title>
        <style>p { color: red }</style></head><body><nav>Home | About</nav>
        <h1>Mills</h1><p>One <b>bold</b>ly written&nbsp;line.<br>Next line.</p>
        <script>alert("no")</script><ul><li>first</li><li>second</li></ul>
        <table><tr><td>a</td><td>b</td></tr></table><!-- hidden --></body></html>""",
        ".html",
    )
    assert page.title == "A page"
    assert page.text.split("\n\n") == [
        "Mills",
        "One boldly written line.\nNext line.",
        "first",
        "second",
        "a b",
    ]


def test_html_is_read_in_the_encoding_that_it_names() -> None:
    page = '<html><head><meta charset="iso-8859-1"></head><body>Mühle</body></html>'
    assert read_markup(page.encode("latin-1"), ".htm").text == "Mühle"
    assert read_markup(page.replace("iso-8859-1", "utf-8").encode(), ".htm").text
    assert read_markup(b"<?xml version='1.0'?><p>a</p>", ".xhtml").text == "a"
    assert read_markup(b"no markup.at/all", ".html").text == "no markup.at/all"


def test_deeply_nested_html_is_read_or_refused_and_never_breaks() -> None:
    deep = "<div>" * 5000 + "core" + "</div>" * 5000
    assert read(deep, ".html").text == "core"


def test_markdown_keeps_words_and_loses_addresses() -> None:
    page = read(
        "---\ntitle: x\n---\n<!-- note -->\n# The [mill](https://a.example) #\n\n"
        'See ![a wheel](wheel.png) and [the river](r.html "River").\n\n'
        "```python\nturn()\n```\n\n[ref]: https://b.example\n",
        ".md",
    )
    assert page.title == "The mill"
    assert page.text == ("The mill\n\nSee a wheel and the river.\n\nturn()")
    assert read("plain words", ".markdown") == Document("plain words", "")


def test_text_is_utf8_with_or_without_a_mark() -> None:
    assert read_markup(b"\xef\xbb\xbfa", ".txt").text == "a"
    with pytest.raises(InvalidRequest, match="byte 1 is 0xff"):
        read_markup(b"a\xff", ".txt")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_markup("a".encode("utf-16"), ".md")


def test_files_of_a_directory_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = (
        "b.txt",
        "a/z.md",
        "a/b/c.HTML",
        "a/d.txt.gz",
        "x.pdf",
        ".git/e.txt",
        ".f.txt",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [name for name, _ in document_files(tmp_path)]
    assert found == ["b.txt", "a/d.txt.gz", "a/z.md", "a/b/c.HTML"]
    looked = documents.look_over(tmp_path)
    assert (looked.documents, looked.size) == (4, 4)
    assert [name for name, _ in document_files(tmp_path / "x.pdf")] == ["x.pdf"]
    assert is_lines(tmp_path / "a.jsonl.gz")
    assert not is_lines(tmp_path / "a.json")


def test_documents_have_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(PayloadTooLarge, match="11 bytes"):
        documents.read_file(tmp_path / "a.txt")
    parsed = DocumentReader().read(b'{"id": 1, "text": "eleven byte"}')
    assert isinstance(parsed.error, PayloadTooLarge)
    assert (parsed.label, parsed.custom_id) == ("number", "1")
