"""From bytes or loosely typed objects to requests with the right types.

The decoder's complaints become `InvalidRequest` with the field's name as the caller
wrote it, the value found, and what was expected.
"""

import re
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from .errors import InvalidRequest, ProtocolError
from .messages import SCHEMA_VERSION, JobRequest, Message, Prompt, Sampling

_TYPE_PROBLEM: Final = re.compile(r"(?P<problem>.*?)(?: - at `(?P<path>.*)`)?", re.S)
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.*)`", re.S)
_Kind = TypeVar("_Kind", Prompt, JobRequest)


def decode_prompt(source: bytes | Mapping[str, object] | Prompt) -> Prompt:
    """Returns a prompt whose fields all have the right types.

    A `Prompt` made in Python is checked as well: constructors check nothing.

    Args:
        source: JSON bytes, a mapping, or a prompt with any field types.

    Returns:
        The prompt, with sequences as tuples and names as enum members.

    Raises:
        InvalidRequest: Not an object, an unknown field, or a wrong type.
    """
    if isinstance(source, Prompt):
        return _convert(_plain_prompt(source), Prompt)
    if isinstance(source, bytes):
        return _convert(_parse(source, "prompt"), Prompt)
    return _convert(source, Prompt)


def decode_request(payload: bytes) -> JobRequest:
    """Returns the request in `in:<id>`, which any client may have written.

    Args:
        payload: JSON bytes.

    Returns:
        The request. Unknown fields of its sampling are refused, those of the
        request itself belong to later versions and are ignored.

    Raises:
        InvalidRequest: Not JSON, not an object, or a wrong type.
        ProtocolError: Written by a later version of the protocol.
    """
    request = _convert(_parse(payload, "request"), JobRequest)
    if request.v > SCHEMA_VERSION:
        raise ProtocolError(
            f"the request has schema version {request.v}; this process reads up to "
            f"{SCHEMA_VERSION}: upgrade it"
        )
    return request


def _plain_prompt(prompt: Prompt) -> dict[str, object]:
    plain = msgspec.structs.asdict(prompt)
    if isinstance(prompt.sampling, Sampling):
        plain["sampling"] = msgspec.structs.asdict(prompt.sampling)
    if isinstance(prompt.messages, list | tuple):
        plain["messages"] = [
            msgspec.structs.asdict(m) if isinstance(m, Message) else m
            for m in prompt.messages
        ]
    return plain


def _parse(source: bytes, what: str) -> object:
    try:
        return msgspec.json.decode(source)
    except UnicodeDecodeError as error:
        raise InvalidRequest(what, f"is not UTF-8: {error}") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(what, f"is not JSON in UTF-8: {error}") from None


def _convert(source: object, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(source, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), source) from None


def _type_error(text: str, source: object) -> InvalidRequest:
    """Turns the decoder's words into a field, the value found and the problem."""
    match = _TYPE_PROBLEM.fullmatch(text)
    assert match is not None
    problem, path = match["problem"], match["path"] or "$"
    unknown = _UNKNOWN_FIELD.search(problem)
    if unknown is not None:
        parent = _field(path)
        field = f"{parent}.{unknown[1]}" if parent else unknown[1]
        return InvalidRequest(field, "is not a field that tokenmill knows")
    field = _field(path) or "prompt"
    found = _value_at(path, source)
    value = "" if found is None else f"; found {shown(found)}"
    return InvalidRequest(field, f"{problem[:1].lower()}{problem[1:]}{value}")


def _field(path: str) -> str:
    """`$.sampling.top_p` is `top_p` to a caller, `key` in `$.x` is `x`."""
    inner = path.rsplit("`", 1)[-1]
    return inner.removeprefix("$").removeprefix(".").removeprefix("sampling.")


def _value_at(path: str, source: object) -> object | None:
    value: object = source
    for part in re.findall(r"\.(\w+)|\[(\d+)\]", path.rsplit("`", 1)[-1]):
        if part[0] and isinstance(value, Mapping):
            value = value.get(part[0])
        elif part[1] and isinstance(value, list | tuple):
            value = value[int(part[1])]
        else:
            return None
    return value


def shown(value: object) -> str:
    """Returns a value as an error message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond Python's limit of printed digits
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
