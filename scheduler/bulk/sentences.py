"""Where sentences and paragraphs of a text begin and end. Pure; any language.

Rules rather than a trained model: a sentence ends at a mark that ends sentences, at a
blank line, and before a line that begins a list item, heading, quote or table row. A
sentence that is cut too late only makes a window's border coarser; one that is cut too
early splits a thought, so abbreviations and initials do not end one.

Every pattern takes time in proportion to the text, whatever stands in it: a search
that is running cannot be interrupted. So repeats give nothing back (`++`, `*+`), and
none may begin in the midst of a run that it would have to read to its end.
"""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

_BLANK: Final = re.compile(r"\n[^\S\n]*\n\s*|\f\s*|\u2029\s*")
"""Between paragraphs."""
_LINE: Final = re.compile(
    r"\n(?=[^\S\n]*(?:[-*+•‣▪·—\u2013]\s|\d{1,3}[.)]\s|#{1,6}\s|>|\||```|~~~))"
)
"""Before a line that stands for itself."""
_HEADING: Final = re.compile(r"(?m:^)[^\S\n]*+#{1,6}\s[^\n]*+\n")
_RULE: Final = re.compile(r"\n(?:={3,}+|-{3,}+|~{3,}+|\^{3,}+)[^\S\n]*+(?:\n|$)")
"""Under a heading of reStructuredText or Markdown."""
_END: Final = re.compile(
    r"(?<![.!?…‽])[.!?…‽]++[\"'”\u2019»)\]}]*+(?=\s)"  # before white space
    r"|[。！？｡．؟۔।॥։።]++[\"'”\u2019»)\]}」』）】]*+"  # noqa: RUF001 - those of other scripts
)
_ABBREVIATIONS: Final = frozenset(
    (
        *("al", "approx", "art", "bzw", "ca", "cf", "ch", "co", "corp", "dept", "dr"),
        *("ed", "eds", "eg", "e.g", "esp", "est", "etc", "fig", "figs", "gen"),
        *("hr", "ie", "i.e", "inc", "jr", "ltd", "mr", "mrs", "ms"),
        *("nos", "nr", "op", "p", "pp", "prof", "resp", "sr", "st"),
        *("str", "u.a", "univ", "usw", "v", "vgl", "vol", "vs", "viz", "z.b"),
    )
)
_LAST_WORD: Final = re.compile(r"[^\s(\[{\"'“\u2018«]+$")
_WORD_REACH: Final = 24
"""Characters before a full stop that are looked at: no abbreviation is longer."""


class Sentence(msgspec.Struct, frozen=True):
    """Characters of a text from `start` up to `end`, without white space around."""

    start: int
    end: int
    ends_paragraph: bool = False


def sentences(text: str) -> list[Sentence]:
    """Divides a text; nothing but white space lies between what is returned.

    Args:
        text: Any text.

    Returns:
        Sentences in order. None is empty.
    """
    found: list[Sentence] = []
    for start, end in _paragraphs(text):
        inside = [
            span
            for block in _blocks(text, start, end)
            for span in _sentences(text, *block)
        ]
        found += [Sentence(*span) for span in inside[:-1]]
        found += [Sentence(*span, ends_paragraph=True) for span in inside[-1:]]
    return found


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for match in _BLANK.finditer(text):
        yield start, match.start()
        start = match.end()
    yield start, len(text)


def _blocks(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    block = text[start:end]  # where it begins, a line does
    borders = {start + match.start() for match in _LINE.finditer(block)}
    borders |= {start + match.end() for match in _HEADING.finditer(block)}
    borders |= {start + match.end() for match in _RULE.finditer(block)}
    for border in sorted(b for b in borders if start < b < end):
        yield start, border
        start = border
    yield start, end


def _sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    for match in _END.finditer(text, start, end):
        if _ends(text, start, match, end):
            yield from _stripped(text, start, match.end())
            start = match.end()
    yield from _stripped(text, start, end)


def _stripped(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    piece = text[start:end]
    left = len(piece) - len(piece.lstrip())
    right = len(piece.rstrip())
    if left < right:
        yield start + left, start + right


def _ends(text: str, start: int, match: re.Match[str], end: int) -> bool:
    """Whether this mark ends a sentence, or only a word."""
    follows = text[match.end() : min(match.end() + 8, end)].lstrip()[:1]
    if match[0][0] != ".":
        return not (match[0][0] == "…" and follows.islower())
    if follows.islower():
        return False
    word = _LAST_WORD.search(
        text, max(start, match.start() - _WORD_REACH), match.start()
    )
    if word is None:
        return True
    spelled = word[0].lower()
    is_initial = len(spelled) == 1 and spelled.isalpha() and word[0].isupper()
    # The number of a list item belongs to what follows.
    is_number = spelled.isdigit() and not text[start : word.start()].strip()
    return not (is_initial or is_number or spelled in _ABBREVIATIONS)
