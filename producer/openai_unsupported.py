"""What OpenAI's API has and this server does not: refused by name, unless it asks for
nothing.
"""

from collections.abc import Callable, Mapping
from typing import Final

from ..shared.decode import shown
from ..shared.errors import InvalidRequest

Neutral = Mapping[str, Callable[[object], bool]]
"""Names of fields -> whether a value asks for nothing."""


def _is_empty(value: object) -> bool:
    return not value


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value == one for one in values)


_NOTHING: Final = _one_of()
_COMMON: Final[Neutral] = {
    "metadata": _is_empty,
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
}
CHAT: Final[Neutral] = {
    **_COMMON,
    "audio": _NOTHING,
    "function_call": _one_of("none"),
    "functions": _is_empty,
    "modalities": _one_of(["text"]),
    "moderation": _NOTHING,
    "parallel_tool_calls": _NOTHING,
    "prediction": _NOTHING,
    "prompt_cache_retention": _NOTHING,
    "reasoning_effort": _one_of("none"),
    "response_format": _one_of({"type": "text"}),
    "tool_choice": _one_of("none"),
    "tools": _is_empty,
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
}
COMPLETION: Final[Neutral] = {
    **_COMMON,
    "echo": _one_of(False),
    "suffix": _is_empty,
}
"""Fields of OpenAI's API that are not supported -> values that ask for nothing."""
_IN_MESSAGE: Final = ("name", "tool_calls", "tool_call_id", "function_call", "audio")
_ROLES: Final = ("tool", "function")


def without_unsupported(
    body: Mapping[str, object], fields: Neutral
) -> dict[str, object]:
    """Returns the rest of a body.

    Args:
        body: What the caller sent.
        fields: Those that are not supported.

    Raises:
        InvalidRequest: One of them asks for something; it is named.
    """
    plain = dict(body)
    for name in fields.keys() & plain.keys():
        value = plain.pop(name)
        if value is not None and not fields[name](value):
            raise unsupported(name, value)
    return plain


def unsupported(name: str, value: object) -> InvalidRequest:
    """Returns the error of a field that is not supported."""
    return InvalidRequest(
        name, f"{shown(value)} is not supported by this server; leave it out"
    )


def checked_message(index: int, message: object) -> object:
    """Returns a message without what asks for nothing.

    Args:
        index: Its place in the conversation.
        message: What the caller sent.

    Raises:
        InvalidRequest: It has something that is not supported; its place is named.
    """
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if role in _ROLES:
        raise InvalidRequest(
            f"messages[{index}].role", f"'{role}' is not supported by this server"
        )
    neutral = [n for n in (*_IN_MESSAGE, "refusal") if n in message]
    for name in neutral:
        if message[name]:
            raise unsupported(f"messages[{index}].{name}", message[name])
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise InvalidRequest(
                f"messages[{index}].content",
                f"parts of type {shown(kind)} are not supported; expected text",
            )
    return {n: value for n, value in message.items() if n not in neutral}
