"""Keeping Python's garbage collector from pausing a process that serves."""

import gc
from typing import Final

THRESHOLDS: Final = (10_000, 20, 20)
"""Requests and replies die by reference count; what is left are rare cycles, so the
young generation may be looked at a tenth as often."""


def settle() -> None:
    """Leaves what is loaded by now out of later collections, and makes those rarer.

    Modules and tokenizers are hundreds of thousands of objects that never die. A full
    collection walks them all and holds every request for tens of milliseconds. May be
    called again when more was loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
