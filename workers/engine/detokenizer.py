"""Token ids to text, one token at a time.

Each token is bytes. Characters leave once all their bytes are there, so one split over
tokens never shows as U+FFFD; bytes that can never become a character do, as in the
tokenizer's own decoding.
"""

import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from ...shared.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES: Final = "bytes"
"""Name of the tokenizer whose token id is the byte itself, for tests and benchmarks."""
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NEW_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class DetokenizerSource(Protocol):
    """Where the engine gets a detokenizer for each choice."""

    def start(self) -> "Detokenizer":
        """Returns a fresh detokenizer for one output."""
        ...


class Detokenizer:
    """Text of one output, in steps.

    Args:
        pieces: Bytes of each token id; special tokens have none.
        first_pieces: Bytes of a token that is the first to have any, where the
            tokenizer writes that one differently.
        strip: Spaces to drop from the start of the text.
    """

    __slots__ = ("_decoder", "_first_pieces", "_pieces", "_strip")

    def __init__(
        self,
        pieces: tuple[bytes, ...],
        first_pieces: tuple[bytes, ...] | None = None,
        strip: int = 0,
    ) -> None:
        self._pieces = pieces
        self._first_pieces = first_pieces
        self._strip = strip
        self._decoder = _NEW_DECODER(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes a token and returns the text that is complete with it.

        Args:
            token_id: Any id; one beyond the tokenizer's vocabulary has no text.
        """
        if token_id >= len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if self._first_pieces is not None and piece:
            piece, self._first_pieces = self._first_pieces[token_id], None
        return self._stripped(self._decoder.decode(piece))

    def flush(self) -> str:
        """Ends the output: bytes of an incomplete character become U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    @property
    def has_pending(self) -> bool:
        """Whether the first bytes of a character wait for the rest."""
        return bool(self._decoder.getstate()[0])

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class TokenTable:
    """Bytes of every token of a vocabulary, shared by all outputs.

    Args:
        pieces: See `Detokenizer`.
        first_pieces: See `Detokenizer`.
        strip: See `Detokenizer`.
    """

    __slots__ = ("_first_pieces", "_strip", "pieces")

    def __init__(
        self,
        pieces: tuple[bytes, ...],
        first_pieces: tuple[bytes, ...] | None = None,
        strip: int = 0,
    ) -> None:
        self.pieces = pieces
        self._first_pieces = first_pieces
        self._strip = strip

    def start(self) -> Detokenizer:
        """Returns a fresh detokenizer for one output."""
        return Detokenizer(self.pieces, self._first_pieces, self._strip)

    @classmethod
    def for_bytes(cls) -> "TokenTable":
        """The table of the tokenizer whose token id is the byte itself."""
        return cls(tuple(bytes((value,)) for value in range(256)))

    @classmethod
    def from_directory(cls, directory: Path) -> "TokenTable":
        """Reads `tokenizer.json` of a model directory.

        Args:
            directory: The model's directory, or the file itself.

        Raises:
            ModelLoadError: There is none, or its decoder is of an unknown kind.
        """
        from tokenizers import Tokenizer

        path = directory if directory.is_file() else directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(
                f"cannot read tokenizer {path}: {error}; expected the tokenizer.json "
                "of the tokenizers library"
            ) from error
        return cls.from_tokenizer(tokenizer)

    @classmethod
    def from_tokenizer(cls, tokenizer: "Tokenizer") -> "TokenTable":
        """Builds the table of a tokenizer of the `tokenizers` library.

        Args:
            tokenizer: Byte-level BPE, or sentencepiece-style with byte fallback.

        Raises:
            ModelLoadError: Its decoder is of another kind.
        """
        rules = _rules(json.loads(tokenizer.to_str()).get("decoder"))
        added = tokenizer.get_added_tokens_decoder()
        names = [
            None
            if (token is None or (index in added and added[index].special))
            else token
            for index in range(_size(tokenizer))
            for token in (tokenizer.id_to_token(index),)
        ]
        pieces = _convert(names, rules.convert)
        first = None if rules.convert_first is None else rules.convert_first
        first_pieces = None if first is None else _convert(names, first)
        return cls(pieces, first_pieces, rules.strip)


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
