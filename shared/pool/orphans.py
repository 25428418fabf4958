"""No process outlives the one that started it, even one that is killed."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


def die_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Returns what a child runs before its program so that it ends with its parent.

    The kernel sends the signal when the parent is gone; the setting outlives exec.

    Args:
        number: The signal: SIGKILL for processes that hold nothing, SIGTERM for a
            server that should save first.

    Returns:
        A function for `preexec_fn`, or None where the system has no such service
        (macOS, Windows): there a killed supervisor leaves its children.
    """
    if sys.platform != "linux":
        return None
    # Loaded before the fork: a child of a process with threads must not import.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            # It died between fork and here, so the kernel will send nothing.
            os._exit(1)

    return before_exec


def end_with(parent: int, number: signal.Signals) -> bool:
    """Has this process end with its parent, without a hand in the parent's fork.

    The kernel sends the signal when the *thread* is gone that started this process, so
    a parent starts such children from one that lives as long as they may.

    Args:
        parent: Its process id, as the parent knows it.
        number: The signal.

    Returns:
        Whether the parent is there; where it is not, nothing will be sent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() == parent
