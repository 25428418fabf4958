"""Log probabilities in OpenAI's two forms, with the text of each token."""

import codecs
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ..shared.messages import TokenLogprob

Spell = Callable[[int], bytes]
"""Bytes of a token id."""
_NEW_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was likely in one place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token of one place, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a choice of a chat."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a choice of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where each token begins in the text, in characters."""


def spelled(raw: bytes) -> str:
    r"""Returns a token as OpenAI shows it: its text, or `bytes:\\xe2\\x82`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], spell: Spell
) -> ChatLogprobs:
    """Returns the log probabilities of a run of tokens, as a chat has them.

    Args:
        token_ids: The run.
        logprobs: One for each.
        spell: Bytes of a token id.
    """
    content = []
    for token_id, one in zip(token_ids, logprobs, strict=False):
        raw = spell(token_id)
        top = [
            TopLogprob(token=spelled(other), logprob=value, bytes=[*other])
            for value, other in ((v, spell(i)) for i, v in one.top)
        ]
        content.append(
            ChatTokenLogprob(
                token=spelled(raw), logprob=one.logprob, bytes=[*raw], top_logprobs=top
            )
        )
    return ChatLogprobs(content=content)


class CompletionLogprobsWriter:
    """Writes the log probabilities of one choice of a completion, run after run.

    Args:
        spell: Bytes of a token id.
    """

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._decoder = _NEW_DECODER(errors="replace")
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Returns those of the next run.

        Args:
            token_ids: The run.
            logprobs: One for each.
        """
        tokens, offsets = [], []
        for token_id in token_ids:
            raw = self._spell(token_id)
            tokens.append(spelled(raw))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(raw))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[one.logprob for one in logprobs],
            top_logprobs=[
                {spelled(self._spell(i)): value for i, value in one.top}
                for one in logprobs
            ],
            text_offset=offsets,
        )
