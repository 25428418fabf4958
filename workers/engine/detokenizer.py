"""Token ids to text, one token at a time.

Each token is bytes. Characters leave once all their bytes are there, so one split over
tokens never shows as U+FFFD; bytes that can never become a character do, as in the
tokenizer's own decoding.
"""

import codecs
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from ...shared.errors import ModelLoadError
from ...shared.token_pieces import TokenPieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES: Final = "bytes"
"""Name of the tokenizer whose token id is the byte itself, for tests and benchmarks."""
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
        table = TokenPieces(tokenizer)
        return cls(table.pieces, table.first_pieces, table.strip)
