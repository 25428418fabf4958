"""What OpenAI's API has and this server does not: refused by name, unless it asks for
nothing.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from ..shared.errors import InvalidRequest
from ..shared.typed import shown

Neutral = Mapping[str, Callable[[object], bool]]
"""Names of fields -> whether a value asks for nothing."""


def _is_empty(value: object) -> bool:
    return not value


def _is_void(value: object) -> bool:
    """Whether a field says nothing, as a client writes those that it does not use."""
    return value is None or value == "" or value == [] or value == {}


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: any(value == one for one in values)


_NOTHING: Final = _one_of()
_COMMON: Final[Neutral] = {
    "function_call": _one_of("none"),
    "functions": _is_empty,
    "metadata": _is_empty,
    "response_format": _one_of({"type": "text"}),
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "tool_choice": _one_of("none"),
    "tools": _is_empty,
}
CHAT: Final[Neutral] = {
    **_COMMON,
    "audio": _NOTHING,
    "modalities": _one_of(["text"]),
    "moderation": _NOTHING,
    "parallel_tool_calls": _one_of(False),
    "prediction": _NOTHING,
    "prompt_cache_retention": _NOTHING,
    "reasoning_effort": _one_of("none"),
    "verbosity": _NOTHING,
    "web_search_options": _NOTHING,
}
COMPLETION: Final[Neutral] = {
    **_COMMON,
    "echo": _one_of(False),
    "suffix": _is_empty,
}
"""Fields of OpenAI's API that are not supported -> values that ask for nothing."""
_SWITCHES: Final = (("tool_choice", "tools"), ("function_call", "functions"))
"""Fields whose value `none` says that another is not to be used."""
_IN_MESSAGE: Final = frozenset(("role", "content"))
_IN_PART: Final = frozenset(("type", "text"))
_WITHOUT_EFFECT: Final = frozenset(("name", "annotations", "cache_control"))
"""Of a message or a part: nothing that a model would read. Prompts that begin alike
share what was computed of them without being told."""
_ROLES: Final = ("tool", "function")


def without_unsupported(
    body: Mapping[str, object], fields: Neutral, known: Collection[str]
) -> dict[str, object]:
    """Returns the rest of a body.

    Args:
        body: What the caller sent.
        fields: Those that are not supported.
        known: Those that are. Any other that says nothing is left out.

    Raises:
        InvalidRequest: One of them asks for something; it is named.
    """
    kept = fields.keys() | set(known)
    plain = {n: value for n, value in body.items() if n in kept or not _is_void(value)}
    for switch, of in _SWITCHES:
        if switch in fields and plain.get(switch) == "none":
            plain.pop(of, None)
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
    where = f"messages[{index}]"
    plain = _only(message, _IN_MESSAGE, where)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [
            _checked_part(part, f"{where}.content", index)
            for index, part in enumerate(content)
        ]
    return plain


def _checked_part(part: object, where: str, index: int) -> object:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        raise InvalidRequest(
            where, f"parts of type {shown(kind)} are not supported; expected text"
        )
    return _only(part, _IN_PART, f"{where}[{index}]")


def _only(
    given: Mapping[str, object], known: Collection[str], where: str
) -> dict[str, object]:
    """What is known of a message or part; another field may be there and say nothing.

    An answer that is sent back as a turn of the conversation brings such fields.
    """
    for name, value in given.items():
        if name not in known and name not in _WITHOUT_EFFECT and not _is_void(value):
            raise unsupported(f"{where}.{name}", value)
    return {name: value for name, value in given.items() if name in known}
