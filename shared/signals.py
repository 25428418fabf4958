"""Signals before a command has begun its work. Imports next to nothing: it comes first.

An interrupt while modules are being imported would surface as a traceback from
wherever the interpreter happened to be; here it ends the process without a word.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM)
"""What a terminal, a supervisor or `timeout` sends to end a command."""


def heard() -> list[signal.Signals]:
    """Returns those of `ENDING` that this process does not ignore.

    A shell starts background jobs with SIGINT ignored, and means it.
    """
    if threading.current_thread() is not threading.main_thread():
        return []  # only the main thread may set handlers
    return [n for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN]


def end_at_once() -> None:
    """From here on a signal ends the process silently with 128 plus its number.

    A reader that leaves, as in `tokenmill --help | head`, ends it as well.
    """
    for number in heard():
        signal.signal(number, _end)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


@contextmanager
def handled(*, raising: bool) -> Iterator[None]:
    """The signals of a command at work; the handlers before it come back at the end.

    Args:
        raising: SIGINT raises `KeyboardInterrupt`, as blocking code expects; else it
            ends the process until an event loop takes it over.
    """
    numbers = heard()
    before = {number: signal.getsignal(number) for number in numbers}
    if numbers and hasattr(signal, "SIGPIPE"):
        # A connection that breaks must be an error, not the end of the process.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in numbers:
        blocking = raising and number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if blocking else _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os._exit(128 + number)
