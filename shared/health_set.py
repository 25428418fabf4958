"""Health sets: what a version of a model must answer before it serves anyone.

A file of JSON lines, each one check: a prompt with the output that is expected of it,
or a text with the highest perplexity that it may have.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from .errors import InvalidRequest
from .messages import Message
from .typed import convert

MOST_CHECKS: Final = 200
MOST_BYTES: Final = 64 * 1024
"""Of a whole set as JSON: it stands in Redis, in the specification of its version."""
MOST_TOKENS: Final = 512
"""Output of one check."""
MOST_FAILURES: Final = 5
"""Failed checks that a report describes; it counts all."""
_EXPECTATIONS: Final = ("exact", "prefix", "contains", "regex")


class HealthCheck(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """One line of a set. A prompt is answered greedily, with the seed 0."""

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    """Instead of `prompt`: a conversation, for models with a chat template."""
    max_tokens: int = 32
    exact: str | None = None
    """The whole output."""
    prefix: str | None = None
    """How it begins."""
    contains: str | None = None
    regex: str | None = None
    """Found anywhere in it: of the syntax of Python's `re`, searched for seconds."""
    text: str | None = None
    """Is not continued but read: its tokens' perplexity is measured."""
    max_perplexity: float | None = None
    line: int = 0
    """Of the file, from 1; set when it is read."""


class HealthSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All checks of one version."""

    checks: tuple[HealthCheck, ...] = ()


class HealthReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a set in one worker."""

    passed: bool
    num_checks: int
    num_failed: int = 0
    failures: tuple[str, ...] = ()
    """Of the first that failed: line, expectation, and what came instead."""
    perplexity: float | None = None
    """Over all texts of the set together."""
    took_ms: float = 0.0
    group: str = ""
    """The worker that ran it."""


def read_health_set(path: Path) -> HealthSet:
    """Reads a file of checks.

    Raises:
        InvalidRequest: It cannot be read, or a line is wrong; names line and field.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidRequest(
            "health",
            f"'{path}' cannot be read: {reason}; expected a file of JSON lines",
        ) from None
    return parse_health_set(data, path.name)


def parse_health_set(data: bytes, name: str) -> HealthSet:
    """Reads checks from JSON lines; blank lines are passed over.

    Args:
        data: UTF-8.
        name: Of the file, for errors.

    Raises:
        InvalidRequest: A line is wrong, or the whole is empty or too large.
    """
    checks: list[HealthCheck] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            checks.append(_check(line, number))
        except InvalidRequest as error:
            where = f"{name} line {number}: {error.field}"
            raise InvalidRequest(where, error.problem) from None
    _require_size(checks, name)
    return HealthSet(checks=tuple(checks))


def _check(line: bytes, number: int) -> HealthCheck:
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("check", f"is not JSON: {error}") from None
    check = convert(raw, HealthCheck, "check")
    for field, problem in _problems(check):
        raise InvalidRequest(field, problem)
    return msgspec.structs.replace(check, line=number)


def _problems(check: HealthCheck) -> Iterator[tuple[str, str]]:
    """Yields field and problem, the first first."""
    inputs = [
        n for n in ("prompt", "messages", "text") if getattr(check, n) is not None
    ]
    if len(inputs) != 1:
        found = " and ".join(inputs) or "none"
        yield "prompt", f"expected one of prompt, messages and text; found {found}"
    if inputs and not getattr(check, inputs[0]):
        yield inputs[0], "is empty"
    if check.text is not None:
        yield from _problems_of_text(check)
    else:
        yield from _problems_of_prompt(check)


def _problems_of_text(check: HealthCheck) -> Iterator[tuple[str, str]]:
    bound = check.max_perplexity
    if bound is None:
        yield "max_perplexity", "is missing; a text needs the highest it may have"
    elif not (math.isfinite(bound) and bound > 1):
        yield "max_perplexity", f"value {bound:g}; expected a number above 1"
    for name in _EXPECTATIONS:
        if getattr(check, name) is not None:
            yield name, "a text has no output; expected max_perplexity alone"


def _problems_of_prompt(check: HealthCheck) -> Iterator[tuple[str, str]]:
    if check.max_perplexity is not None:
        yield "max_perplexity", "belongs to a `text`, which is read and not continued"
    given = [name for name in _EXPECTATIONS if getattr(check, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        yield "exact", f"expected one of {', '.join(_EXPECTATIONS)}; found {found}"
    for name in given:
        if not getattr(check, name):
            yield name, "is empty: every output would do"
    if not 1 <= check.max_tokens <= MOST_TOKENS:
        yield (
            "max_tokens",
            f"value {check.max_tokens}; expected 1 to {MOST_TOKENS}",
        )
    if check.regex is not None:
        try:
            re.compile(check.regex)
        except (re.error, OverflowError, RecursionError) as error:
            yield "regex", f"is no regular expression of Python: {error}"


def _require_size(checks: list[HealthCheck], name: str) -> None:
    if not checks:
        raise InvalidRequest(
            "health", f"'{name}' has no line; expected 1 to {MOST_CHECKS} checks"
        )
    if len(checks) > MOST_CHECKS:
        raise InvalidRequest(
            "health",
            f"'{name}' has {len(checks)} checks; expected at most {MOST_CHECKS}",
        )
    size = len(msgspec.json.encode(checks))
    if size > MOST_BYTES:
        raise InvalidRequest(
            "health", f"'{name}' takes {size} bytes; expected at most {MOST_BYTES}"
        )
