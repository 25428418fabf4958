"""Single keys from a terminal, while something else is drawn on it."""

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` for each key that is pressed, for the length of a block.

    Off a terminal there are no keys. The terminal is put back as it was.

    Args:
        on_key: Called on the event loop with one character.
    """
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = os.read(file, 64)
        if not data:  # the terminal is gone
            loop.remove_reader(file)
            on_key("q")
        for key in data.decode(errors="replace"):
            on_key(key)

    tty.setcbreak(file)
    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        with contextlib.suppress(termios.error):  # it may be gone by now
            termios.tcsetattr(file, termios.TCSADRAIN, before)
