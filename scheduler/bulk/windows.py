"""Dividing a long text into windows of bounded tokens on sentence borders. Pure.

Every sentence lies whole in a window, unless it alone is longer than one: it is then
cut at word borders, and a word longer than a window between characters. A window that
ends at a paragraph is preferred where it is at least three quarters full.
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from .sentences import sentences

Count = Callable[[Sequence[str]], Sequence[int]]
"""Exact number of tokens of each text."""

FULL_ENOUGH: Final = 0.75
"""Part of a window from which on it may end at a paragraph."""
CHUNK_CHARACTERS: Final = 16
"""A word longer than a window is cut into pieces of so many characters at most."""
_TRIES: Final = 4
"""How often all windows are made smaller because the tokens of a whole are more than
those of its parts; what is still too large then is cut by words."""
_WORD: Final = re.compile(r"\s*\S+")


class Window(msgspec.Struct, frozen=True):
    """Characters of a text from `start` up to `end`."""

    start: int
    end: int
    tokens: int
    """Exact."""


class _Unit(msgspec.Struct, frozen=True):
    """What is never cut again: a sentence, or a piece of one that is too long."""

    start: int
    end: int
    tokens: int
    """With the white space before it."""
    ends_paragraph: bool = False


def divide(
    text: str, count: Count, window_tokens: int, overlap_tokens: int
) -> list[Window]:
    """Divides a text.

    Args:
        text: Any text.
        count: Of the model's tokenizer.
        window_tokens: Most tokens of a window.
        overlap_tokens: Most tokens that a window repeats of the one before: as many
            whole sentences as fit, or the end of a sentence where not one does. It is
            less where the next sentence needs the room.

    Returns:
        Windows in order; together they have every character but white space. None for
        a text of white space.
    """
    units = _units(text, count, window_tokens, overlap_tokens)
    budget = window_tokens
    for _ in range(_TRIES):
        spans = _Packing(text, count, units, budget, overlap_tokens).spans()
        windows = _measured(text, count, spans)
        excess = max((w.tokens for w in windows), default=0) - window_tokens
        if excess <= 0:
            return windows
        budget = max(budget - excess, window_tokens // 2, 1)
    return [
        piece
        for window in windows
        for piece in (
            [window]
            if window.tokens <= window_tokens
            else _cut(text, window.start, window.end, count, window_tokens)
        )
    ]


def gather(texts: Sequence[str], count: Count, window_tokens: int) -> list[list[int]]:
    """Groups texts that follow each other, so that each group fits a window.

    Args:
        texts: Each far shorter than a window.
        count: Of the model's tokenizer.
        window_tokens: Most tokens of a group, its texts joined by blank lines.

    Returns:
        Positions of the texts of each group, at least two where there are so many.
    """
    sizes = count([f"{text}\n\n" for text in texts])
    groups: list[list[int]] = []
    total = 0
    for index, size in enumerate(sizes):
        fits = total + size <= window_tokens
        if groups and (fits or len(groups[-1]) < 2):
            groups[-1].append(index)
            total += size
        else:
            groups.append([index])
            total = size
    return groups


def _measured(
    text: str, count: Count, spans: Sequence[tuple[int, int]]
) -> list[Window]:
    sizes = count([text[start:end] for start, end in spans])
    return [Window(*span, size) for span, size in zip(spans, sizes, strict=True)]


def _units(text: str, count: Count, limit: int, overlap: int) -> list[_Unit]:
    found = sentences(text)
    before = [0, *(one.end for one in found)]
    sizes = count([text[b : one.end] for b, one in zip(before, found, strict=False)])
    units: list[_Unit] = []
    for one, size in zip(found, sizes, strict=True):
        if size <= limit or count([text[one.start : one.end]])[0] <= limit:
            units.append(_Unit(one.start, one.end, size, one.ends_paragraph))
            continue
        # A piece leaves room for what its window repeats of the one before.
        room = max(limit - overlap, limit // 2, 1)
        pieces = _cut(text, one.start, one.end, count, room)
        units += [_Unit(p.start, p.end, p.tokens) for p in pieces[:-1]]
        last = pieces[-1]
        units.append(_Unit(last.start, last.end, last.tokens, one.ends_paragraph))
    return units


def _cut(text: str, start: int, end: int, count: Count, limit: int) -> list[Window]:
    """Cuts at word borders into pieces of at most `limit` tokens each."""
    words = [match.span() for match in _WORD.finditer(text, start, end)]
    sizes = count([text[a:b] for a, b in words])
    atoms: list[tuple[int, int, int]] = []
    for (a, b), size in zip(words, sizes, strict=True):
        if size <= limit:
            atoms.append((a, b, size))
            continue
        step = max(1, min(CHUNK_CHARACTERS, limit // 8))
        chunks = [(c, min(c + step, b)) for c in range(a, b, step)]
        parts = count([text[c:d] for c, d in chunks])
        atoms += [(c, d, n) for (c, d), n in zip(chunks, parts, strict=True)]
    budget = limit
    while True:
        windows = _measured(text, count, _joined(text, atoms, budget))
        if all(w.tokens <= limit or budget == 1 for w in windows):
            return windows
        budget = max(1, budget - max(1, budget // 8))


def _joined(
    text: str, atoms: Sequence[tuple[int, int, int]], budget: int
) -> list[tuple[int, int]]:
    """Packs atoms greedily; spans do not begin with white space."""
    spans: list[tuple[int, int]] = []
    total = 0
    for start, end, size in atoms:
        if spans and total + size <= budget:
            spans[-1] = (spans[-1][0], end)
            total += size
        else:
            piece = text[start:end]
            spans.append((start + len(piece) - len(piece.lstrip()), end))
            total = size
    return [span for span in spans if span[0] < span[1]]


class _Packing:
    """Units joined to windows with overlap."""

    def __init__(
        self,
        text: str,
        count: Count,
        units: Sequence[_Unit],
        budget: int,
        overlap: int,
    ) -> None:
        self._text = text
        self._count = count
        self._units = units
        self._budget = budget
        self._overlap = overlap
        self._sums = [0, *accumulate(unit.tokens for unit in units)]

    def spans(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        units = self._units
        first, done = 0, 0
        tail: tuple[int, int] | None = None
        """Where the end of a sentence begins that is repeated, and its tokens."""
        while done < len(units):
            spent = 0 if tail is None else tail[1]
            stop = self._stop(first, done, self._budget - spent)
            start = units[first].start if tail is None else tail[0]
            found.append((start, units[stop - 1].end))
            if stop == len(units):
                break
            first = self._repeated(first, stop)
            tail = self._tail(stop) if first == stop else None
            done = stop
        return found

    def _stop(self, first: int, done: int, room: int) -> int:
        """The unit before which a window ends that begins with unit `first`."""
        stop = first
        while stop < len(self._units) and self._tokens(first, stop + 1) <= room:
            stop += 1
        stop = max(stop, done + 1)
        if stop == len(self._units):
            return stop
        least = FULL_ENOUGH * self._budget
        for border in range(stop, done, -1):
            if self._tokens(first, border) < least:
                break
            if self._units[border - 1].ends_paragraph:
                return border
        return stop

    def _tokens(self, first: int, stop: int) -> int:
        return self._sums[stop] - self._sums[first]

    def _repeated(self, first: int, stop: int) -> int:
        """The first of the units that the next window repeats; `stop` for none."""
        again = stop
        while again - 1 > first and self._tokens(again - 1, stop) <= self._overlap:
            again -= 1
        # What comes next must have room beside it.
        while again < stop and self._tokens(again, stop + 1) > self._budget:
            again += 1
        while again < stop and self._size(again, stop) > self._overlap:
            again += 1
        return again

    def _size(self, again: int, stop: int) -> int:
        units = self._units
        return self._count([self._text[units[again].start : units[stop - 1].end]])[0]

    def _tail(self, stop: int) -> tuple[int, int] | None:
        """The end of the last sentence, cut at a word, where none fits whole."""
        room = min(self._overlap, self._budget - self._units[stop].tokens)
        last = self._units[stop - 1]
        words = [m.span() for m in _WORD.finditer(self._text, last.start, last.end)]
        words = words[-room:] if room > 0 else []
        sizes = self._count([self._text[a:b] for a, b in words])
        start, total = last.end, 0
        for (a, b), size in zip(reversed(words), reversed(sizes), strict=True):
            if total + size > room:
                break
            piece = self._text[a:b]
            start, total = a + len(piece) - len(piece.lstrip()), total + size
        if start in (last.end, last.start):
            return None
        exact = self._count([self._text[start : last.end]])[0]
        return (start, exact) if exact <= room else None
