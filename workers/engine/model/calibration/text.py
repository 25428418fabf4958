"""Samples of a calibration text, and how well it covers what a user asks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from .....shared.errors import ModelLoadError
from ..vocabulary import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED_TEXT: Final = Path(__file__).parent / "shipped" / "text.jsonl"
"""Passages of Python Enhancement Proposals; see the README beside them."""
SHIPPED_NAME: Final = "passages of Python Enhancement Proposals"
SAMPLES: Final = 512
LENGTH: Final = 16
"""Tokens a sample."""
MOST_UNSEEN: Final = 0.08
"""Share of a user's words that a calibration text may lack."""
_WORD: Final = re.compile(r"\w+")
_COMMON_WORDS: Final = 20


def read_texts(file: Path) -> list[str]:
    """Reads prompts or passages: JSONL with text, prompt or messages, or plain text.

    Args:
        file: `.jsonl` is read by line, all else is one text.

    Raises:
        ModelLoadError: Unreadable, or a line without text.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if file.suffix != ".jsonl":
        texts = [content]
    else:
        lines = enumerate(content.splitlines(), start=1)
        texts = [_text_of(line, f"{file}:{n}") for n, line in lines if line.strip()]
    if not any(text.strip() for text in texts):
        raise ModelLoadError(f"{file} has no text")
    return texts


def _text_of(line: str, place: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ModelLoadError(f"{place} is no JSON: {error}") from error
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        for key in ("text", "prompt"):
            if isinstance(found.get(key), str):
                return str(found[key])
        messages = found.get("messages")
        if isinstance(messages, list):
            parts = [m.get("content") for m in messages if isinstance(m, dict)]
            return "\n".join(part for part in parts if isinstance(part, str))
    raise ModelLoadError(
        f"{place} has no text: expected a string, or an object with 'text', 'prompt' "
        "or 'messages'"
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Returns a checkpoint's tokenizer.

    Raises:
        ModelLoadError: It has no tokenizer.json, or tokens that the model has not.
    """
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadError(f"{path} has no tokenizer.json, which calibration needs")
    return read_tokenizer(path)


def make_samples(
    tokenizer: Tokenizer, texts: Sequence[str], *, samples: int, length: int
) -> list[list[int]]:
    """Cuts texts into samples of one length, spread evenly over all of them.

    Args:
        tokenizer: The model's.
        texts: Passages.
        samples: Most samples.
        length: Tokens a sample.
    """
    pieces = list(_pieces(tokenizer, texts, length))
    if len(pieces) <= samples:
        return pieces
    return [pieces[index * len(pieces) // samples] for index in range(samples)]


def _pieces(
    tokenizer: Tokenizer, texts: Sequence[str], length: int
) -> Iterator[list[int]]:
    """Yields whole pieces; texts too short for one are joined to the next."""
    rest: list[int] = []
    for text in texts:
        ids = rest + tokenizer.encode(text, add_special_tokens=False).ids
        whole = len(ids) // length * length
        for start in range(0, whole, length):
            yield ids[start : start + length]
        rest = ids[whole:] if whole == 0 else []


class Coverage(msgspec.Struct, frozen=True):
    """How much of a user's text the calibration text has seen."""

    words: int
    unseen_words: int
    """Words, repeats counted, that do not occur in the calibration text."""
    unseen_tokens: int
    """Likewise of the model's tokens."""
    tokens: int
    examples: tuple[str, ...]
    """Unseen words that are frequent."""

    @property
    def unseen_share(self) -> float:
        """Share of the user's words that are unseen."""
        return self.unseen_words / self.words if self.words else 0.0

    @property
    def covered(self) -> bool:
        """INT8 alone is advised; else mixed INT8 and 16 bit."""
        return self.unseen_share <= MOST_UNSEEN


def coverage(
    tokenizer: Tokenizer, user: Sequence[str], calibration: Sequence[str]
) -> Coverage:
    """Compares a user's text with the calibration text.

    Args:
        tokenizer: The model's.
        user: Prompts as users write them.
        calibration: The text that the model is calibrated on.
    """
    seen_words = {word for text in calibration for word in _words(text)}
    words = [word for text in user for word in _words(text)]
    unseen: dict[str, int] = {}
    for word in words:
        if word not in seen_words:
            unseen[word] = unseen.get(word, 0) + 1
    seen_ids = {i for t in calibration for i in _ids(tokenizer, t)}
    ids = [i for text in user for i in _ids(tokenizer, text)]
    frequent = sorted(unseen, key=lambda word: (-unseen[word], word))
    return Coverage(
        words=len(words),
        unseen_words=sum(unseen.values()),
        unseen_tokens=sum(i not in seen_ids for i in ids),
        tokens=len(ids),
        examples=tuple(frequent[:_COMMON_WORDS]),
    )


def _words(text: str) -> Iterator[str]:
    return (match.lower() for match in _WORD.findall(text))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
