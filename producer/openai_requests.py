"""OpenAI's request bodies: what is understood, what is refused by name, as prompts."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from ..shared.adapter_names import MOST_FULL_NAME
from ..shared.decode import with_adapter
from ..shared.errors import InvalidRequest
from ..shared.messages import Message, Prompt, Sampling
from ..shared.typed import convert, parse, shown
from ..shared.validate import MAX_STOP_STRINGS
from .openai_unsupported import (
    CHAT,
    COMPLETION,
    Neutral,
    checked_message,
    unsupported,
    without_unsupported,
)
from .queue_fields import QueueFields, with_fields

COMPLETION_TOKENS: Final = 16
"""`max_tokens` of a completion that names none, as OpenAI has it."""
CHAT_TOKENS: Final = 1024
"""The same of a chat. OpenAI's is the rest of the context; here room is kept for as
many tokens as a request may produce, so that would leave little for others."""
MAX_PROMPTS: Final = 128
"""Prompts of one request; each is a job."""
_SEEDS: Final = 2**63
"""A job's seed is below; OpenAI's may be negative: -1 is the same as the largest."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream is to contain besides text."""

    include_usage: bool = False
    """A last chunk with the tokens counted."""
    include_obfuscation: bool = False
    """Understood and without effect: chunks are never padded."""


class _Body(QueueFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both forms have in common; None is the same as not given."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_FULL_NAME)]
    """Perhaps with an adapter: `<model>:<adapter>`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None
    ) = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[int, _Bias] | None = None
    user: str | None = None
    """Understood and without effect: tenants have keys of their own."""

    # Beyond OpenAI's API; the client's `extra_body` sends them.
    tenant: str | None = None
    """Over HTTP: act for this tenant, with a key that may."""
    top_k: _Count | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_tokens: _Natural | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=10)] | None = None
    stop_token_ids: Annotated[list[_Natural], msgspec.Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    control_tokens: Literal["refuse", "as_text", "allow"] | None = None
    refuse_late: bool | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the tokens counted."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: (
        str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None


class ChatBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    safety_identifier: str | None = None
    """Understood and without effect."""
    prompt_cache_key: str | None = None
    """Understood and without effect: prompts that begin alike share what was
    computed of them without being told."""


Body = CompletionBody | ChatBody
_AnyBody = TypeVar("_AnyBody", CompletionBody, ChatBody)


def decode_completion(source: bytes | Mapping[str, object]) -> CompletionBody:
    """Reads the body of POST /v1/completions.

    Args:
        source: JSON, or what it says.

    Raises:
        InvalidRequest: It is wrong or not supported; the field is named.
    """
    plain = _plain(source, COMPLETION, CompletionBody)
    best_of = plain.pop("best_of", None)
    if best_of is not None and best_of != (plain.get("n") or 1):
        raise unsupported("best_of", best_of)
    prompt = plain.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        raise InvalidRequest(
            "prompt", "token ids are not supported; expected text, or a list of texts"
        )
    return _checked(convert(plain, CompletionBody, "body"))


def decode_chat(source: bytes | Mapping[str, object]) -> ChatBody:
    """Reads the body of POST /v1/chat/completions.

    Args:
        source: JSON, or what it says.

    Raises:
        InvalidRequest: It is wrong or not supported; the field is named.
    """
    plain = _plain(source, CHAT, ChatBody)
    messages = plain.get("messages")
    if isinstance(messages, list):
        plain["messages"] = [checked_message(i, m) for i, m in enumerate(messages)]
    body = _checked(convert(plain, ChatBody, "body"))
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "is given without logprobs; set it, too")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens", "differs from max_completion_tokens; give one of them"
        )
    return body


def _plain(
    source: bytes | Mapping[str, object], unsupported_fields: Neutral, form: type[_Body]
) -> dict[str, object]:
    decoded = parse(source, "body") if isinstance(source, bytes) else source
    if not isinstance(decoded, Mapping):
        raise InvalidRequest("body", f"expected an object, found {shown(decoded)}")
    return without_unsupported(
        decoded, unsupported_fields, form.__struct_encode_fields__
    )


def _checked(body: _AnyBody) -> _AnyBody:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "is given without stream; set it, too")
    return body


def prompts_of(body: Body, max_context: int | None = None) -> tuple[Prompt, ...]:
    """Returns the prompts of a request, one for each job that it takes.

    Args:
        body: A decoded body.
        max_context: Of the model, where known: a limit of output that the caller did
            not give stays below it.
    """
    sampling = _sampling(body, max_context)
    common = Prompt(
        model=body.model,
        sampling=sampling,
        control_tokens=body.control_tokens or "refuse",
        refuse_late=bool(body.refuse_late),
    )
    common = with_adapter(with_fields(common, body))
    if isinstance(body, ChatBody):
        messages = tuple(_turn(message) for message in body.messages)
        return (msgspec.structs.replace(common, messages=messages),)
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return tuple(msgspec.structs.replace(common, text=text) for text in texts)


def _turn(message: ChatMessage) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    # Models that reason have "developer" for what others call "system".
    role = "system" if message.role == "developer" else message.role
    return Message(role, content)


def _sampling(body: Body, max_context: int | None) -> Sampling:
    if isinstance(body, ChatBody):
        most, default = body.max_completion_tokens or body.max_tokens, CHAT_TOKENS
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        most, default = body.max_tokens, COMPLETION_TOKENS
        logprobs = body.logprobs
    if max_context is not None:
        default = min(default, max_context)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given: dict[str, object] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "max_tokens": most or default,
        "n": body.n,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "min_tokens": body.min_tokens,
        "seed": None if body.seed is None else body.seed % _SEEDS,
        "stop": stop,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": body.logit_bias,
        "logprobs": logprobs,
        "ignore_eos": body.ignore_eos,
    }
    kept = {name: value for name, value in given.items() if value is not None}
    return msgspec.convert(kept, Sampling)
