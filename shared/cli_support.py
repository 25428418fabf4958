"""What every command does the same way: errors, exit codes, interrupts."""

import asyncio
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar, cast

import msgspec

from .cli_streams import discard_output, flush_output, is_output_error, open_streams
from .errors import ConfigError, InvalidRequest, JobFailed, TokenmillError, kind_of
from .signals import handled, heard

if TYPE_CHECKING:
    import typer

P = ParamSpec("P")
R = TypeVar("R")

EXIT_USAGE: Final = 2
"""Wrong usage of the command line."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE: Final = 141
"""128 + SIGPIPE: the reader of our output left, as in `tokenmill tail … | head`."""
EXIT_UNEXPECTED: Final = 70
"""EX_SOFTWARE of sysexits: a bug of ours, not the caller's mistake."""
EXIT_OUTPUT: Final = 74
"""EX_IOERR of sysexits: standard output cannot be written."""

_PATIENT_SIGNALS: Final = 2
"""Signals that ask a command to come to its end; one more ends it where it is."""


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
        try:
            yield
        finally:
            flush_output()  # what cannot be written is told here, not at exit
    except TokenmillError as error:
        _exit_with(error, as_json=as_json)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        discard_output()
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except Exception as error:
        # Typer's own exits and usage errors are exceptions that only it can handle.
        if type(error).__module__.split(".")[0] in {"click", "typer"}:
            raise
        if isinstance(error, OSError) and is_output_error(error):
            _exit_output(error, as_json=as_json)
        _exit_unexpected(error, as_json=as_json)


def describe(error: TokenmillError) -> tuple[str, int, str | None]:
    """Returns an error's code, exit code and the field at fault, if one is.

    A job that failed has those of its recorded error; a code that this version does
    not know leaves the exit code of a failed job.
    """
    if type(error) is JobFailed:
        kind = kind_of(error.error_code)
        exit_code = error.exit_code if kind is None else kind.exit_code
        return error.error_code, exit_code, error.field
    field: str | None = None
    if isinstance(error, InvalidRequest | JobFailed):
        field = error.field
    elif isinstance(error, ConfigError):
        field = error.key
    return error.code, error.exit_code, field


def _exit_with(error: TokenmillError, *, as_json: bool) -> NoReturn:
    code, exit_code, field = describe(error)
    print_error(code, str(error), field, as_json=as_json)
    if os.environ.get("TOKENMILL_DEBUG") == "1":
        traceback.print_exception(error)
    raise SystemExit(exit_code) from None


def _exit_output(error: OSError, *, as_json: bool) -> NoReturn:
    discard_output()
    message = f"standard output cannot be written: {error.strerror or error}"
    print_error("output_failed", message, None, as_json=as_json)
    raise SystemExit(EXIT_OUTPUT) from None


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

    A coroutine function is run to its end; SIGINT and SIGTERM cancel it, and the exit
    code is 128 plus the signal's number. A parameter named `as_json` that is true
    makes errors JSON.

    Args:
        command: The function to wrap; its signature is kept for typer.
    """
    is_async = inspect.iscoroutinefunction(command)

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = kwargs.get("as_json") is True
        with errors_to_exit(as_json=as_json), handled(raising=not is_async):
            if is_async:
                work = cast("Coroutine[Any, Any, R]", command(*args, **kwargs))
                return _run(work)
            return command(*args, **kwargs)
        raise AssertionError("errors_to_exit never swallows")

    return wrapper


def _run(work: Coroutine[Any, Any, R]) -> R:
    signals: list[int] = []
    with asyncio.Runner() as runner:
        try:
            return runner.run(_cancelled_by_signals(work, signals))
        except asyncio.CancelledError:
            if not signals:
                raise
            raise SystemExit(128 + signals[0]) from None


async def _cancelled_by_signals(work: Coroutine[Any, Any, R], signals: list[int]) -> R:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def hear(number: int) -> None:
        signals.append(number)
        if len(signals) > _PATIENT_SIGNALS:
            os._exit(128 + number)
        task.cancel()

    for number in heard():
        loop.add_signal_handler(number, hear, int(number))
    return await work


def run_app(build: "Callable[[], typer.Typer]", args: Sequence[str]) -> int:
    """Runs the command line.

    Args:
        build: Makes the application.
        args: What follows the command's name. With `--json` among the options, wrong
            usage is told as JSON as well.

    Returns:
        The exit code, where it is not raised.
    """
    open_streams()
    options = args[: args.index("--")] if "--" in args else args
    as_json = "--json" in options
    with errors_to_exit(as_json=as_json):
        app = build()
        if not as_json:
            app(args=list(args))  # typer shows wrong usage in its own way, and exits
        try:
            code = app(args=list(args), standalone_mode=False)
        except Exception as error:
            # Typer keeps the kinds of wrong usage to itself; this is their interface.
            told = getattr(error, "format_message", None)
            if told is None:
                raise
            message = _with_value(told(), error, options)
            print_error("usage", message, _wrong_option(error), as_json=True)
            return EXIT_USAGE
        return code if isinstance(code, int) else 0
    raise AssertionError("errors_to_exit never swallows")


def _wrong_option(error: Exception) -> str | None:
    """The option or argument at fault as the user writes it."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return getattr(error, "option_name", None)
    names = [name for name in parameter.opts if name.startswith("-")]
    return max(names, key=len) if names else str(parameter.name)


def _with_value(message: str, error: Exception, options: Sequence[str]) -> str:
    """Adds the value that was given, which typer leaves out of some messages."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for index, option in enumerate(options):
        name, is_joined, value = option.partition("=")
        if name not in names:
            continue
        if not is_joined:
            value = options[index + 1] if index + 1 < len(options) else ""
        if value and value not in message:
            return f"{message}; found {value!r}"
    return message
