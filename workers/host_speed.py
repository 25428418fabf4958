"""How fast this host reads memory and multiplies, measured in a fraction of a second.

Neighbours on the host slow single probes down, never speed them up: the best of several
is what the host can do, and hardly changes from call to call.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_PROBE_VALUES: Final = 32 * 1024 * 1024
"""128 MiB of float32: beyond any cache."""
_PART_VALUES: Final = 2 * 1024 * 1024
"""Read in less than a time slice of the system."""
_BANDWIDTH_S: Final = 0.2
_WIDTH: Final = 1024
"""Of the matrix that is multiplied: in INT8 it stays in a core's cache."""
_MOST_ROWS: Final = 64
"""Kernels reach their full rate at fewer."""
_COMPUTE_ROUNDS: Final = 3
_COMPUTE_S: Final = 0.06


def host_bandwidth() -> float:
    """Measures how fast this host reads memory: bytes a second."""
    import torch

    values = torch.ones(_PROBE_VALUES, dtype=torch.float32)
    # Each part has left the caches when its turn comes.
    parts = [
        values[start : start + _PART_VALUES]
        for start in range(0, _PROBE_VALUES, _PART_VALUES)
    ]
    turn = itertools.cycle(parts)

    def read() -> None:
        next(turn).sum()

    best = _best(read, len(parts), _BANDWIDTH_S)
    with _one_thread():  # which on a busy host waits for no other
        best = min(best, _best(read, len(parts), _BANDWIDTH_S))
    return parts[0].nbytes / best


def compute_rates(
    precisions: Iterable[str], rows: int, threads: int | None = None
) -> dict[str, float]:
    """Measures multiply-adds a second of linear layers by precision of the weights.

    INT8 goes through the kernels that serve, all others through torch's product. One
    thread is measured and counted for each: no more can be had from them, and threads
    that wait for each other on a busy host would measure the neighbours.

    Args:
        precisions: Those to measure.
        rows: Tokens of a step.
        threads: That compute; None is one a core.
    """
    import torch

    from .engine.model.load import available_cores

    cores = threads or available_cores()
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    count = max(1, min(rows, _MOST_ROWS))
    products = count * _WIDTH * _WIDTH
    works: dict[str, Callable[[], object]] = {}
    for precision in precisions:
        if precision == "int8":
            works[precision] = _int8_product(count)
        elif precision in known:
            works[precision] = _float_product(count, known[precision])
    with _one_thread():
        return {
            precision: cores * products / _best(work, _COMPUTE_ROUNDS, _COMPUTE_S)
            for precision, work in works.items()
        }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets kernels and torch compute with one thread each."""
    import torch

    from .engine.kernels import ops
    from .engine.model.load import available_cores

    before = torch.get_num_threads()
    ops.set_num_threads(1, torch_threads=1)
    try:
        yield
    finally:
        ops.set_num_threads(available_cores(), torch_threads=before)


def _int8_product(rows: int) -> Callable[[], object]:
    import torch

    from .engine.kernels import ops

    weight = ops.quantize_weight(torch.randn(_WIDTH, _WIDTH))
    inputs = torch.randn(rows, _WIDTH)
    return lambda: ops.linear(inputs, weight)


def _float_product(rows: int, dtype: torch.dtype) -> Callable[[], object]:
    import torch

    weight = torch.randn(_WIDTH, _WIDTH).to(dtype)
    inputs = torch.randn(rows, _WIDTH).to(dtype)
    return lambda: torch.nn.functional.linear(inputs, weight)


def _best(work: Callable[[], object], rounds: int, seconds: float) -> float:
    """Returns the shortest time of a call, after one to warm up.

    Args:
        work: What is timed.
        rounds: Least number of calls.
        seconds: Time after which no further call begins.
    """
    work()
    best = float("inf")
    end = time.perf_counter() + seconds
    done = 0
    while done < rounds or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
        done += 1
    return best
