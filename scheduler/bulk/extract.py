"""Summaries without a model: the key sentences of a text, in its own order. Pure.

TextRank (Mihalcea and Tarau, "TextRank: Bringing Order into Texts", EMNLP 2004):
sentences are the nodes of a graph, its edges weigh the words that two share divided by
the logarithms of their lengths, and PageRank says which are central. The graph of a
window has some hundred nodes at most; longer texts go part by part.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from .sentences import sentences
from .words import limit_words, num_words

DAMPING: Final = 0.85
"""As in the paper."""
ROUNDS: Final = 30
TOLERANCE: Final = 1e-4
MOST_SENTENCES: Final = 150
"""More are ranked in runs of so many, and then the chosen ones again."""
_WORD: Final = re.compile(r"\w+")
_COMMON: Final = 0.5
"""A word in more than this part of the sentences says nothing of any."""


def key_sentences(text: str, max_words: int) -> str:
    """Returns the most central sentences of a text, within a number of words.

    Args:
        text: Any text.
        max_words: Most words; one sentence alone that has more is cut.

    Returns:
        The sentences in their order; empty only for a text without any character but
        white space.
    """
    found = [text[one.start : one.end] for one in sentences(text)]
    found = list(dict.fromkeys(found))  # a repeated line is said once
    while len(found) > MOST_SENTENCES:
        found = [
            sentence
            for first in range(0, len(found), MOST_SENTENCES)
            for sentence in _central(found[first : first + MOST_SENTENCES])
        ]
    return _chosen(found, max_words)


def _central(part: Sequence[str]) -> list[str]:
    """The better half of some sentences, in order."""
    scores = rank(part)
    order = sorted(range(len(part)), key=lambda i: -scores[i])
    return [part[i] for i in sorted(order[: max(1, len(part) // 2)])]


def _chosen(found: Sequence[str], max_words: int) -> str:
    if not found:
        return ""
    scores = rank(found)
    order = sorted(range(len(found)), key=lambda i: (-scores[i], i))
    sizes = [num_words(sentence) for sentence in found]
    chosen: list[int] = []
    left = max_words
    for index in order:
        if sizes[index] <= left:
            chosen.append(index)
            left -= sizes[index]
        elif left < max_words / 2:
            break  # what is less central yet would only fill the room
    if not chosen:
        return limit_words(found[order[0]], max_words)
    return " ".join(" ".join(found[index].split()) for index in sorted(chosen))


def rank(found: Sequence[str]) -> list[float]:
    """Returns how central each sentence is; higher is more.

    Args:
        found: Sentences.
    """
    bags = [frozenset(_WORD.findall(sentence.casefold())) for sentence in found]
    edges = _edges(bags)
    sums = [math.fsum(near.values()) for near in edges]
    scores = [1.0] * len(found)
    for _ in range(ROUNDS):
        new = [
            (1 - DAMPING)
            + DAMPING * math.fsum(w / sums[j] * scores[j] for j, w in edges[i].items())
            for i in range(len(found))
        ]
        moved = max((abs(a - b) for a, b in zip(new, scores, strict=True)), default=0)
        scores = new
        if moved < TOLERANCE:
            break
    return scores


def _edges(bags: Sequence[frozenset[str]]) -> list[dict[int, float]]:
    """Weights between sentences that share a word."""
    where: defaultdict[str, list[int]] = defaultdict(list)
    for index, bag in enumerate(bags):
        for word in bag:
            where[word].append(index)
    most = max(3.0, _COMMON * len(bags))
    shared: list[defaultdict[int, int]] = [defaultdict(int) for _ in bags]
    for indexes in where.values():
        if len(indexes) > most:
            continue
        for i in indexes:
            for j in indexes:
                if i != j:
                    shared[i][j] += 1
    lengths = [math.log(len(bag) + 1) for bag in bags]
    return [
        {j: number / (lengths[i] + lengths[j]) for j, number in near.items()}
        for i, near in enumerate(shared)
    ]
