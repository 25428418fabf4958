"""Words of a summary: counting them, and keeping to a limit. Pure."""

import re
from typing import Final

from .sentences import sentences

KEPT: Final = 0.5
"""A text that is too long is cut at a sentence where that keeps this much of what is
allowed, otherwise at a word."""
LONGEST: Final = 32
"""Characters of one word; what is longer counts as several, so that a limit of words is
one of characters, too."""
_HAN: Final = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
)
"""Chinese and Japanese: a character counts as a word."""
_THAI: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
"""Thai, Lao, Burmese and Khmer: no spaces either, and some four characters a word."""
_WORD: Final = re.compile(
    rf"[{_HAN}]|[{_THAI}]{{1,4}}+|[^\s{_HAN}{_THAI}]{{1,{LONGEST}}}+"
)


def num_words(text: str) -> int:
    """Returns the number of words.

    Args:
        text: Any text; where a script has no spaces, its characters are counted.
    """
    return sum(1 for _ in _WORD.finditer(text))


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
