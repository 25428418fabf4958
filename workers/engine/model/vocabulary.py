"""Holds a checkpoint's tokenizer against the vocabulary that its model has.

A vocabulary larger than the tokenizer is common, since matrices are padded. A token
beyond the vocabulary has no embedding: text that contains it cannot be computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ....shared.errors import ModelLoadError
from .families import read_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAMED_IN_MESSAGE: Final = 5
log = structlog.get_logger("tokenmill.model")


def read_tokenizer(directory: Path, vocab_size: int | None = None) -> Tokenizer:
    """Returns a checkpoint's tokenizer, after a look at its ids.

    Args:
        directory: With tokenizer.json.
        vocab_size: Rows of the embedding; None is what config.json says, and nothing is
            checked where it says nothing.

    Raises:
        ModelLoadError: It cannot be read, or has tokens that the model has not.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower kind
        raise ModelLoadError(
            f"cannot read tokenizer {path}: {error}; expected the tokenizer.json of "
            "the tokenizers library"
        ) from error
    size = vocab_size or read_config(directory).get("vocab_size")
    if isinstance(size, int):
        _check_ids(path, tokenizer, size)
    return tokenizer


def _check_ids(path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses ordinary tokens beyond the vocabulary, and warns of added ones."""
    added = tokenizer.get_added_tokens_decoder()
    # By far the most tokenizers are smaller than the model: two numbers tell.
    if max(tokenizer.get_vocab_size(), *added, 0) < vocab_size:
        return
    ids = tokenizer.get_vocab().items()
    beyond = sorted((index, token) for token, index in ids if index >= vocab_size)
    ordinary = [(index, token) for index, token in beyond if index not in added]
    if ordinary:
        raise ModelLoadError(
            f"{path} has {len(ordinary)} tokens beyond the model's vocabulary of "
            f"{vocab_size} ({_named(ordinary)}); the two are not from the same "
            "checkpoint: fetch it again"
        )
    if beyond:
        log.warning(
            "tokens_beyond_vocabulary",
            path=str(path),
            vocabulary=vocab_size,
            tokens=_named(beyond),
            reason="the model has no embedding for these added tokens: prompts that "
            "contain them are refused",
        )


def _named(tokens: list[tuple[int, str]]) -> str:
    shown = [f"{token!r} is {index}" for index, token in tokens[:_NAMED_IN_MESSAGE]]
    more = len(tokens) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
