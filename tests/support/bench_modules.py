"""Imports the scripts in `bench`, which are no package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"


def bench_module(name: str) -> ModuleType:
    # At the end: `bench/queue.py` must not hide the standard library's module.
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)
