"""What every command does the same way: errors, exit codes, interrupts."""

import asyncio
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, ParamSpec, TypeVar, cast

import msgspec

from .errors import ConfigError, InvalidRequest, TokenmillError

P = ParamSpec("P")
R = TypeVar("R")

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE: Final = 141
"""128 + SIGPIPE: the reader of our output left, as in `tokenmill tail … | head`."""
EXIT_UNEXPECTED: Final = 70
"""EX_SOFTWARE of sysexits: a bug of ours, not the caller's mistake."""


def print_error(code: str, message: str, field: str | None, *, as_json: bool) -> None:
    """Writes one error to standard error.

    Args:
        code: Its name on the wire, for example `queue_full`.
        message: What was wrong, what was expected, what to do.
        field: The request field or configuration key at fault, if one is.
        as_json: Write `{"error": {"code", "message", "field"}}`, not a text line.
    """
    if as_json:
        body = {"error": {"code": code, "message": message, "field": field}}
        print(msgspec.json.encode(body).decode(), file=sys.stderr, flush=True)
    else:
        print(f"error: {message}", file=sys.stderr, flush=True)


@contextmanager
def errors_to_exit(*, as_json: bool = False) -> Iterator[None]:
    """Turns any exception inside into a message and the exit code documented for it.

    Raises:
        SystemExit: With the code of the error.
    """
    try:
        yield
    except TokenmillError as error:
        _exit_with(error, as_json=as_json)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The interpreter flushes at exit and would complain about the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except Exception as error:
        # Typer's own exits and usage errors are exceptions that only it can handle.
        if type(error).__module__.split(".")[0] in {"click", "typer"}:
            raise
        _exit_unexpected(error, as_json=as_json)


def _exit_with(error: TokenmillError, *, as_json: bool) -> NoReturn:
    field: str | None = None
    if isinstance(error, InvalidRequest):
        field = error.field
    elif isinstance(error, ConfigError):
        field = error.key
    print_error(error.code, str(error), field, as_json=as_json)
    if os.environ.get("TOKENMILL_DEBUG") == "1":
        traceback.print_exception(error)
    raise SystemExit(error.exit_code) from None


def _exit_unexpected(error: Exception, *, as_json: bool) -> NoReturn:
    if os.environ.get("TOKENMILL_DEBUG") == "1":
        traceback.print_exception(error)
    message = (
        f"unexpected {type(error).__name__}: {error}. This is a bug in tokenmill; "
        "run again with TOKENMILL_DEBUG=1 for the traceback"
    )
    print_error("internal_error", message, None, as_json=as_json)
    raise SystemExit(EXIT_UNEXPECTED) from None


def handle_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorates a typer command: errors become messages and exit codes.

    A coroutine function is run to its end with `asyncio.run`. A parameter named
    `as_json` that is true makes errors JSON.

    Args:
        command: The function to wrap; its signature is kept for typer.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with errors_to_exit(as_json=kwargs.get("as_json") is True):
            result = command(*args, **kwargs)
            if inspect.iscoroutine(result):
                return cast("R", asyncio.run(result))
            return result
        raise AssertionError("errors_to_exit never swallows")

    return wrapper
