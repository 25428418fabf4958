"""Words of a summary: counting them, and keeping to a limit. Pure."""

import re
from typing import Final

from .sentences import sentences

KEPT: Final = 0.5
"""A text that is too long is cut at a sentence where that keeps this much of what is
allowed, otherwise at a word."""
_WORD: Final = re.compile(r"\S+")


def num_words(text: str) -> int:
    """Returns the number of words: runs of characters without white space."""
    return len(text.split())


def limit_words(text: str, most: int) -> str:
    """Returns at most `most` words from the beginning of a text.

    Args:
        text: Any text.
        most: At least 1.

    Returns:
        The text, stripped; shortened at a sentence's end where that keeps half of what
        is allowed, else at a word's end.
    """
    ends = [match.end() for match in _WORD.finditer(text)]
    if len(ends) <= most:
        return text.strip()
    limit = ends[most - 1]
    return cut_at_sentence(text[:limit], least=round(most * KEPT))


def without_repeats(text: str) -> str:
    """Returns a text that says each of its sentences once: small models go in circles.

    Args:
        text: What a model wrote. It is returned as it is where nothing is repeated.
    """
    found = [text[one.start : one.end] for one in sentences(text)]
    kept: dict[str, str] = {}
    for one in found:
        kept.setdefault(" ".join(one.casefold().split()), one)
    return text if len(kept) == len(found) else " ".join(kept.values())


def cut_at_sentence(text: str, *, least: int) -> str:
    """Removes an unfinished last sentence, unless too little would be left.

    Args:
        text: A text that breaks off somewhere.
        least: Fewest words to keep.
    """
    found = sentences(text)
    if len(found) > 1:
        whole = text[: found[-2].end].strip()
        if num_words(whole) >= max(least, 1):
            return whole
    return text.strip()
