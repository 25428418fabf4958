"""From JSON to structs, and what is wrong with a value in the words of who wrote it.

The decoder's complaints become `InvalidRequest` with the field's name as the caller
wrote it, the value found, and what was expected.
"""

import json
import re
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
import msgspec.inspect

from .errors import InvalidRequest

_TYPE_PROBLEM: Final = re.compile(r"(?P<problem>.*?)(?: - at `(?P<path>.*)`)?", re.S)
_MISSING_FIELD: Final = re.compile(r"missing required field `(.*)`", re.S)
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.*)`", re.S)
_STEP: Final = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_CUT_SHORT: Final = "Input data was truncated"
_HALF_PAIR: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
)
_Kind = TypeVar("_Kind")


def parse(source: bytes, what: str) -> object:
    """Returns what JSON says.

    Args:
        source: JSON in UTF-8.
        what: Names it in an error.

    Raises:
        InvalidRequest: It is empty, not JSON in UTF-8, or nested too deeply.
    """
    if not source or source.isspace():
        raise InvalidRequest(what, "is empty; expected JSON")
    try:
        return msgspec.json.decode(source)
    except UnicodeDecodeError as error:
        raise InvalidRequest(what, f"is not UTF-8: {error}") from None
    except msgspec.DecodeError as error:
        if str(error) == _CUT_SHORT and (half := _half_pair(source)) is not None:
            raise InvalidRequest(what, half) from None
        raise InvalidRequest(what, f"is not JSON in UTF-8: {error}") from None
    except RecursionError:
        raise _too_deep(what) from None


def _half_pair(source: bytes) -> str | None:
    """Says where half a character is, which the decoder takes for a missing end."""
    try:
        json.loads(source)
    except ValueError:
        return None  # it is cut short indeed
    found = _HALF_PAIR.search(source)
    if found is None:
        return None
    spelled = found[0][-6:].decode()
    return (
        f"has {spelled} at byte {found.end() - 6}, which is half of a character; "
        "expected both halves, as in \\ud83d\\ude00"
    )


def _too_deep(what: str) -> InvalidRequest:
    return InvalidRequest(
        what, "is nested too deeply; expected a few levels of objects and arrays"
    )


def convert(source: object, kind: type[_Kind], what: str) -> _Kind:
    """Returns `source` as a struct whose fields all have the right types.

    Args:
        source: A mapping, as JSON gives it.
        kind: The struct.
        what: Names the whole in an error.

    Raises:
        InvalidRequest: Not an object, an unknown field, or a wrong type; it names the
            field, the value found and what was expected.
    """
    try:
        return msgspec.convert(source, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), source, kind, what) from None
    except RecursionError:
        raise _too_deep(what) from None


def _type_error(text: str, source: object, kind: type, what: str) -> InvalidRequest:
    """Turns the decoder's words into a field, the value found and the problem."""
    match = _TYPE_PROBLEM.fullmatch(text)
    assert match is not None
    problem, path = match["problem"], match["path"] or "$"
    unknown = _UNKNOWN_FIELD.search(problem)
    if unknown is not None:
        parent = _field(path)
        field = f"{parent}.{unknown[1]}" if parent else unknown[1]
        return InvalidRequest(field, "is not a field that tokenmill knows")
    missing = _MISSING_FIELD.search(problem)
    if missing is not None:
        parent = _field(path)
        field = f"{parent}.{missing[1]}" if parent else missing[1]
        return InvalidRequest(field, "is missing")
    field = _field(path) or what
    found = _value_at(path, source)
    choices = _choices_at(path, kind) if isinstance(found, str) else ()
    if choices:
        expected = ", ".join(choices)
        return InvalidRequest(field, f"{shown(found)} is not one of {expected}")
    value = "" if found is None else f"; found {shown(found)}"
    return InvalidRequest(field, f"{problem[:1].lower()}{problem[1:]}{value}")


def _field(path: str) -> str:
    """`$.sampling.top_p` is `sampling.top_p`, `key` in `$.x` is `x`."""
    return path.rsplit("`", 1)[-1].removeprefix("$").removeprefix(".")


def _choices_at(path: str, kind: type) -> tuple[str, ...]:
    """The words that a field takes, if it takes one of a few.

    The decoder's complaint does not list them.
    """
    here: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    for name, _ in _STEP.findall(path.rsplit("`", 1)[-1]):
        here = [below for one in here for below in _below(one, name)]
    words: list[str] = []
    for one in here:
        if isinstance(one, msgspec.inspect.LiteralType):
            words += [str(value) for value in one.values]
        elif isinstance(one, msgspec.inspect.EnumType):
            words += [str(member.value) for member in one.cls]
        elif isinstance(one, msgspec.inspect.StrType):
            return ()
    return tuple(words)


def _below(kind: msgspec.inspect.Type, name: str) -> list[msgspec.inspect.Type]:
    """What may stand in a field of a type, or in a place of it without a name."""
    found: list[msgspec.inspect.Type] = []
    for one in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        if name and isinstance(one, msgspec.inspect.StructType):
            found += [f.type for f in one.fields if f.encode_name == name]
        elif not name and isinstance(
            one, msgspec.inspect.ListType | msgspec.inspect.VarTupleType
        ):
            found.append(one.item_type)
    return [
        option
        for one in found
        for option in (
            one.types if isinstance(one, msgspec.inspect.UnionType) else (one,)
        )
    ]


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
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # most of what is shown came as JSON
    try:
        text = repr(value)
    except ValueError:  # an integer beyond Python's limit of printed digits
        return "an integer of thousands of digits"
    except RecursionError:
        return "something nested too deeply to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."
