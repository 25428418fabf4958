"""OpenAI's answers, made from results of jobs."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from ..shared.adapter_names import full_name
from ..shared.messages import Choice, FinishReason, JobResult
from ..shared.messages import Usage as JobUsage
from .openai_logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    Spell,
    chat_logprobs,
)

Ending = Literal["stop", "length"]
CHAT_ID: Final = "chatcmpl-"
COMPLETION_ID: Final = "cmpl-"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens counted, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of several answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Ending


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    """Version of the weights."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of several outputs."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Ending


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None = None
    """Version of the weights."""


def ending_of(reason: FinishReason) -> Ending:
    """Returns OpenAI's word for why a choice ended well."""
    return "length" if reason is FinishReason.LENGTH else "stop"


def usage_of(counts: Iterable[JobUsage]) -> Usage:
    """Returns the tokens of all jobs of a request, added up."""
    prompt = completion = 0
    for one in counts:
        prompt += one.prompt_tokens
        completion += one.completion_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
    )


def model_of(result: JobResult) -> str:
    """Returns the name of what answered: `<model>:<adapter>` with an adapter."""
    return full_name(result.model, result.adapter.name if result.adapter else None)


def chat_answer(
    result: JobResult, *, created: int, spell: Spell | None = None
) -> ChatCompletion:
    """Returns the answer to a chat.

    Args:
        result: Of a job that succeeded.
        created: When it was asked for, as Unix time in seconds.
        spell: Bytes of a token id; None leaves log probabilities out.
    """
    return ChatCompletion(
        id=CHAT_ID + result.id,
        created=created,
        model=model_of(result),
        choices=[_chat_choice(choice, spell) for choice in result.choices],
        usage=usage_of([result.usage]),
        system_fingerprint=result.weights_version,
    )


def _chat_choice(choice: Choice, spell: Spell | None) -> ChatChoice:
    logprobs = None
    if choice.logprobs is not None and spell is not None:
        logprobs = chat_logprobs(choice.token_ids, choice.logprobs, spell)
    return ChatChoice(
        index=choice.index,
        message=AssistantMessage(content=choice.text),
        logprobs=logprobs,
        finish_reason=ending_of(choice.finish_reason),
    )


def completion_answer(
    results: Sequence[JobResult], *, created: int, spell: Spell | None = None
) -> Completion:
    """Returns the answer to a completion of one or more prompts.

    Args:
        results: Of jobs that succeeded, in the order of the prompts. Choices are
            numbered through: those of the first prompt, of the second, and so on.
        created: When it was asked for, as Unix time in seconds.
        spell: Bytes of a token id; None leaves log probabilities out.
    """
    choices: list[CompletionChoice] = []
    for result in results:
        for choice in result.choices:
            logprobs = None
            if choice.logprobs is not None and spell is not None:
                writer = CompletionLogprobsWriter(spell)
                logprobs = writer.write(choice.token_ids, choice.logprobs)
            choices.append(
                CompletionChoice(
                    index=len(choices),
                    text=choice.text,
                    logprobs=logprobs,
                    finish_reason=ending_of(choice.finish_reason),
                )
            )
    first = results[0]
    return Completion(
        id=COMPLETION_ID + first.id,
        created=created,
        model=model_of(first),
        choices=choices,
        usage=usage_of(result.usage for result in results),
        system_fingerprint=first.weights_version,
    )
