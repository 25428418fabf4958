"""OpenAI's chunks of a stream, made from deltas of jobs."""

from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..shared.messages import Delta
from .openai_answers import CHAT_ID, COMPLETION_ID, Ending, Usage, ending_of
from .openai_logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    Spell,
    chat_logprobs,
)


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Ending | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Ending | None = None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a streamed completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class _Writer:
    """Writes the chunks of one stream.

    Args:
        job_id: Of its first job.
        model: The model's public name.
        created: When it was asked for, as Unix time in seconds.
        version: Of the weights.
        with_usage: A last chunk counts the tokens; all others say that it is to come.
        spell: Bytes of a token id; None leaves log probabilities out.
    """

    def __init__(
        self,
        job_id: str,
        model: str,
        *,
        created: int,
        version: str | None = None,
        with_usage: bool = False,
        spell: Spell | None = None,
    ) -> None:
        self._job_id = job_id
        self._model = model
        self._created = created
        self._version = version
        self._spell = spell
        self._usage = None if with_usage else UNSET
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        """Number of a choice -> what counts the text of a completion so far."""


class ChatChunks(_Writer):
    """Writes a chat; see `_Writer` for its arguments."""

    def of(self, delta: Delta, first: int = 0) -> Iterator[ChatCompletionChunk]:
        """Yields the chunks of what is new.

        Args:
            delta: Of one of the stream's jobs.
            first: Number of that job's first choice.
        """
        index, logprobs = first + delta.choice, None
        if delta.offset == 0 and (delta.token_ids or delta.finish_reason):
            yield self._of_choice(index, ChatDelta(role="assistant", content=""))
        if delta.logprobs and self._spell is not None:
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs, self._spell)
        if delta.text or logprobs is not None:
            yield self._of_choice(index, ChatDelta(content=delta.text), logprobs)
        if delta.finish_reason is not None:
            end = ending_of(delta.finish_reason)
            yield self._of_choice(index, ChatDelta(), None, end)

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        """Returns the chunk that counts the tokens."""
        return self._chunk([], usage)

    def _of_choice(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        end: Ending | None = None,
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=logprobs, finish_reason=end
        )
        return self._chunk([choice], self._usage)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=CHAT_ID + self._job_id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._version,
            choices=choices,
            usage=usage,
        )


class CompletionChunks(_Writer):
    """Writes a completion; see `_Writer` for its arguments."""

    def of(self, delta: Delta, first: int = 0) -> Iterator[CompletionChunk]:
        """Yields the chunks of what is new.

        Args:
            delta: Of one of the stream's jobs.
            first: Number of that job's first choice.
        """
        index = first + delta.choice
        logprobs, reason = self._logprobs(index, delta), delta.finish_reason
        if not delta.text and logprobs is None and reason is None:
            return
        choice = CompletionChunkChoice(
            index=index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=None if reason is None else ending_of(reason),
        )
        yield self._chunk([choice], self._usage)

    def usage(self, usage: Usage) -> CompletionChunk:
        """Returns the chunk that counts the tokens."""
        return self._chunk([], usage)

    def _logprobs(self, index: int, delta: Delta) -> CompletionLogprobs | None:
        if not delta.logprobs or self._spell is None:
            return None
        writer = self._writers.get(index)
        if writer is None:
            writer = self._writers[index] = CompletionLogprobsWriter(self._spell)
        return writer.write(delta.token_ids, delta.logprobs)

    def _chunk(
        self, choices: list[CompletionChunkChoice], usage: Usage | UnsetType | None
    ) -> CompletionChunk:
        return CompletionChunk(
            id=COMPLETION_ID + self._job_id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._version,
            choices=choices,
            usage=usage,
        )


ChunkWriter = ChatChunks | CompletionChunks
"""Writes one of the two forms."""
