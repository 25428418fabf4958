"""What `tokenmill up` prints: one line at a time, flushed, for people and pipes."""

import os
import sys


def line(text: str) -> None:
    """Writes a line to standard output at once.

    Where nobody reads any more, as after `tokenmill up | head`, the pool goes on.
    """
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def process_line(name: str, pid: int | None, state: str) -> None:
    """Writes a line about one process of the pool."""
    shown = f"pid {pid}" if pid is not None else ""
    line(f"{name:<12} {shown:<12} {state}")


def passed_on(name: str, text: str) -> None:
    """Writes a line that a process of the pool wrote."""
    line(f"{name:<12} | {text}")
