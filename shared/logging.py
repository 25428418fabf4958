"""Logging: structlog to standard error, JSON off a terminal, colours on it."""

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Final, TextIO

import msgspec
import structlog

from .config import LogConfig

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PRIVATE: Final = frozenset(
    {"prompt", "text", "messages", "content", "payload", "token_ids", "output"}
)
"""Fields that can hold what a user wrote; only debug lines may carry them."""

_Event = MutableMapping[str, object]


def configure(log: LogConfig, process: str, stream: TextIO | None = None) -> None:
    """Sets up logging for this process; later calls replace the earlier set-up.

    Args:
        log: Level and format.
        process: Name of this process on every line, for example `worker`.
        stream: Where lines go; None is standard error.
    """
    target = sys.stderr if stream is None else stream
    console = log.format == "console" or (log.format == "auto" and target.isatty())
    level = _LEVELS[log.level]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(
            colors=target.isatty(),
            # Not the rich form: it shows local variables, secrets and prompts too.
            exception_formatter=structlog.dev.plain_traceback,
        )
        if console
        else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _drop_private,
            structlog.processors.TimeStamper(
                fmt="%H:%M:%S" if console else "iso", utc=not console
            ),
            # The console renderer formats exceptions itself.
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process)
    _forward_stdlib(max(level, logging.WARNING))


def _to_json(event: object, default: Callable[[object], object]) -> str:
    """The fastest encoder at hand: a busy worker writes a line a job."""
    return msgspec.json.encode(event, enc_hook=default).decode()


def _drop_private(_logger: object, method: str, event: _Event) -> _Event:
    if method == "debug":
        return event
    for name in _PRIVATE.intersection(event):
        event[name] = "[not logged above debug]"
    return event


class _Forward(logging.Handler):
    """Hands records of libraries that use the standard library's logging over."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        emit = log.error if record.levelno >= logging.ERROR else log.warning
        emit("library_log", library=record.name, message=record.getMessage())


def _forward_stdlib(level: int) -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Forward):
            root.removeHandler(handler)
    root.addHandler(_Forward(level))
