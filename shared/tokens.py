"""Tokenizers that travel: packed in Redis by a worker, used by the scheduler.

How their files are packed is `token_bundle.py`.

Importing this module costs nothing; `transformers` is loaded by `load_tokenizer`, and
torch never is where `without_torch` was called first.
"""

import os
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from .errors import InvalidRequest, ModelLoadError, PromptTooLong, ProtocolError
from .messages import JobRequest
from .token_bundle import BYTES as BYTES
from .token_bundle import MAX_BUNDLE_BYTES as MAX_BUNDLE_BYTES
from .token_bundle import TOKENIZER_FILES as TOKENIZER_FILES
from .token_bundle import collect_tokenizer as collect_tokenizer
from .token_bundle import pack_tokenizer as pack_tokenizer
from .token_bundle import unpack_tokenizer as unpack_tokenizer

SPARE_TOKENS: Final = 64
"""Tokens by which a cut in a text may change the count of what stands before it."""

Encoded = list[int] | InvalidRequest
"""Token ids, or why this request alone has none."""


class Tokenizer(Protocol):
    """Turns requests into token ids. One thread at a time may use it."""

    fingerprint: str
    vocab_size: int
    has_chat_template: bool

    def encode_request(
        self, request: JobRequest, max_context: int | None = None
    ) -> list[int]:
        """Returns the prompt's token ids.

        Args:
            request: A request whose fields are valid.
            max_context: Where known, a far longer prompt is refused before all of
                it is tokenized.

        Raises:
            InvalidRequest: A template error, control tokens that the caller did not
                allow, or a prompt that is too long for certain.
        """
        ...

    def encode_requests(
        self, requests: Sequence[JobRequest], max_context: int | None = None
    ) -> list[Encoded]:
        """The same for many at once; an error takes the place of its ids."""
        ...

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Returns how many tokens each text takes inside a prompt.

        Args:
            texts: Plain text: no special tokens are added, and a control token that a
                text spells is counted as text.
        """
        ...


def load_tokenizer(bundle: bytes | str) -> Tokenizer:
    """Builds the tokenizer of a bundle.

    Args:
        bundle: What `pack_tokenizer` returned, or the name `bytes`.

    Raises:
        ProtocolError: Not a bundle.
        ModelLoadError: transformers is missing or cannot read the files.
    """
    if bundle in (BYTES, BYTES.encode()):
        from .tokens_bytes import ByteTokenizer

        return ByteTokenizer()
    if isinstance(bundle, str):
        raise ProtocolError(
            f"'{bundle[:80]}' names no built-in tokenizer; expected '{BYTES}' or a "
            "bundle's bytes"
        )
    fingerprint, files = unpack_tokenizer(bundle)
    with tempfile.TemporaryDirectory(prefix="tokenmill-tokenizer-") as directory:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        return load_tokenizer_directory(Path(directory), fingerprint)


def load_tokenizer_directory(directory: Path, fingerprint: str = "") -> Tokenizer:
    """Builds the tokenizer of a model's directory.

    Raises:
        ModelLoadError: transformers is missing or cannot read the files.
    """
    try:
        from .tokens_huggingface import HuggingFaceTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"tokenizing needs the package '{error.name}': install tokenmill[scheduler]"
        ) from error
    return HuggingFaceTokenizer.load(directory, fingerprint)


def without_torch() -> bool:
    """Keeps transformers from importing torch in this process.

    A process that only tokenizes saves seconds of start and hundreds of megabytes.
    Call it before anything imports transformers; the process can never use torch.

    Returns:
        False where torch is imported already and nothing was changed.
    """
    if sys.modules.get("torch") is not None:
        return False
    sys.modules["torch"] = None  # type: ignore[assignment]
    # transformers advises at import that no model can be used here: that is the point.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return True


def ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as little-endian int32, the form of `ids:<id>`."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def ids_from_bytes(raw: bytes) -> list[int]:
    """Undoes `ids_to_bytes`.

    Raises:
        ProtocolError: The length is no multiple of four.
    """
    packed = array("i")
    if len(raw) % packed.itemsize:
        raise ProtocolError(
            f"token ids take {len(raw)} bytes; expected a multiple of 4 (int32)"
        )
    packed.frombytes(raw)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def prompt_field(request: JobRequest) -> str:
    """Returns the field that holds the prompt: `text` or `messages`."""
    return "text" if request.messages is None else "messages"


def too_long(
    field: str, num_tokens: int, max_context: int, *, exact: bool = True
) -> PromptTooLong:
    """Returns the error of a prompt that leaves no room for output.

    Args:
        field: `text` or `messages`.
        num_tokens: The prompt's length in tokens, or a lower bound.
        max_context: Most tokens of prompt plus output.
        exact: Whether `num_tokens` is exact.
    """
    least = "" if exact else "at least "
    return PromptTooLong(
        field,
        f"the prompt has {least}{num_tokens} tokens; the model holds {max_context} "
        f"tokens of prompt and output: shorten the prompt to at most "
        f"{max_context - 1} tokens",
    )
