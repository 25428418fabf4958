"""The bytes of each token of a vocabulary, as its tokenizer's decoder writes them.

Byte-level BPE, and sentencepiece-style vocabularies with byte fallback.
"""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS_TEXT: Final = "<eos>"
"""How the end-of-sequence token is spelled, so that tests have a control token."""
BYTE_PIECES: Final = (*(bytes((value,)) for value in range(256)), EOS_TEXT.encode())
"""Bytes of every token of the tokenizer of one token per byte."""
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """Bytes of every token.

    Args:
        tokenizer: Of the `tokenizers` library.
        spell_special: Give special tokens the bytes of their names; else none.

    Raises:
        ModelLoadError: Its decoder is of another kind.
    """

    def __init__(self, tokenizer: "Tokenizer", *, spell_special: bool = False) -> None:
        rules = _rules(json.loads(tokenizer.to_str()).get("decoder"))
        added = tokenizer.get_added_tokens_decoder()
        special = {index for index, token in added.items() if token.special}
        names = [
            None if index in special and not spell_special else token
            for index in range(_size(tokenizer))
            for token in (tokenizer.id_to_token(index),)
        ]
        self.pieces = _convert(names, rules.convert)
        first = rules.convert_first
        self.first_pieces = None if first is None else _convert(names, first)
        """Bytes of a token that is the first to have any, where they differ."""
        self.strip = rules.strip
        """Spaces to drop from the start of the text."""


def _size(tokenizer: "Tokenizer") -> int:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return max(vocabulary.values(), default=-1) + 1


def _convert(
    names: list[str | None], convert: Callable[[str], bytes]
) -> tuple[bytes, ...]:
    return tuple(b"" if name is None else convert(name) for name in names)


class _Rules:
    """How a decoder writes a token."""

    def __init__(self) -> None:
        self.byte_level = False
        self.byte_fallback = False
        self.fused = False
        self.replace: list[tuple[str, str]] = []
        self.drop_in_first: str | None = None
        self.strip = 0

    def convert(self, name: str) -> bytes:
        """Bytes of a token."""
        if self.byte_level:
            return _byte_level(name)
        for old, new in self.replace:
            name = name.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes((int(match[1], 16),))
        return name.encode("utf-8", errors="replace")

    @property
    def convert_first(self) -> Callable[[str], bytes] | None:
        """Bytes of the first token, where they differ."""
        mark = self.drop_in_first
        if mark is None:
            return None
        return lambda name: self.convert(name.replace(mark, ""))


def _rules(decoder: dict[str, object] | None) -> _Rules:
    """Reads the decoder section of tokenizer.json."""
    rules = _Rules()
    for part in _flatten(decoder):
        kind = part.get("type")
        if kind == "ByteLevel":
            rules.byte_level = True
        elif kind == "ByteFallback":
            rules.byte_fallback = True
        elif kind == "Fuse":
            rules.fused = True
        elif kind == "Metaspace":
            mark = str(part.get("replacement", "▁"))
            rules.replace.append((mark, " "))
            if part.get("prepend_scheme", "always") != "never":
                rules.drop_in_first = mark
        elif kind == "Replace" and (pattern := _string_pattern(part)) is not None:
            rules.replace.append((pattern, str(part.get("content", ""))))
        elif kind == "Strip" and rules.fused and _strips_spaces_left(part):
            rules.strip = int(str(part.get("start", 0)))
        else:
            raise ModelLoadError(
                f"the tokenizer's decoder {json.dumps(part)[:200]} is not supported; "
                "expected ByteLevel, or Replace, ByteFallback, Fuse, left Strip and "
                "Metaspace"
            )
    return rules


def _flatten(decoder: dict[str, object] | None) -> list[dict[str, object]]:
    if decoder is None:
        raise ModelLoadError(
            "the tokenizer has no decoder, so its tokens cannot be joined to text"
        )
    if decoder.get("type") != "Sequence":
        return [decoder]
    parts = decoder.get("decoders")
    return (
        [part for part in parts if isinstance(part, dict)]
        if isinstance(parts, list)
        else []
    )


def _string_pattern(part: dict[str, object]) -> str | None:
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text if isinstance(text, str) else None


def _strips_spaces_left(part: dict[str, object]) -> bool:
    return part.get("content") == " " and part.get("stop", 0) == 0


def _byte_alphabet() -> dict[str, int]:
    """Printable stand-ins for bytes, as GPT-2 defined them: printable bytes stand for
    themselves, the others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(0x100 + i): value for i, value in enumerate(others)})
    return alphabet


_BYTE_ALPHABET: Final = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    """Bytes of a byte-level token; an added token with other characters is text."""
    try:
        return bytes(_BYTE_ALPHABET[character] for character in name)
    except KeyError:
        return name.encode("utf-8", errors="replace")
