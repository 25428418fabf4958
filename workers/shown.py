"""What a worker shows of its engine and its memory, brought up to date at a scrape."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..shared.metrics import catalog
from ..shared.metrics.instruments import Counter
from ..shared.metrics.jobs import END_STATES
from ..shared.metrics.labels import know, model_label
from .adapters_loader import AdapterLoader
from .engine.request import Capacity

_STATM: Final = Path("/proc/self/statm")


class EngineGauges:
    """Copies the engine's own counters, which it keeps without knowing of Prometheus.

    Args:
        model: Public name.
        capacity: The engine's room and counters, a moment old.
        adapters: What holds its adapters; None: it serves none.
    """

    def __init__(
        self,
        model: str,
        capacity: Callable[[], Capacity],
        adapters: AdapterLoader | None = None,
    ) -> None:
        know((model,))
        self._model = model_label(model)
        self._capacity = capacity
        self._adapters = adapters
        for state in END_STATES:  # a counter that first shows at 1 has no rate until 2
            catalog.REQUESTS.add(self._model, state, by=0)

    def __call__(self) -> None:
        """Brings all of it up to date."""
        model, room = self._model, self._capacity()
        blocks = {
            "used": room.total_blocks - room.free_blocks,
            "cached": room.cached_blocks,
            "free": room.free_blocks - room.cached_blocks,
        }
        for state, count in blocks.items():
            catalog.KV_BLOCKS.set(model, state, to=max(0, count))
        hit = room.prefix_tokens_hit
        _rose(catalog.PREFIX_TOKENS, hit, model, "hit")
        _rose(catalog.PREFIX_TOKENS, room.prefix_tokens_asked - hit, model, "miss")
        _rose(catalog.STEPS, room.steps, model)
        _rose(catalog.STEP_TOKENS, room.scheduled_tokens, model)
        _rose(catalog.PREEMPTIONS, room.preemptions, model)
        _rose(catalog.HALVINGS, room.out_of_memory, model)
        _rose(catalog.OVERRUNS, room.overruns, model)
        catalog.RUNNING.set(model, to=room.num_running)
        catalog.PREFILL_BACKLOG.set(model, to=room.prefill_backlog)
        if self._adapters is not None:
            _adapters(model, self._adapters)
        _memory(model)


def _adapters(model: str, adapters: AdapterLoader) -> None:
    stats = adapters.stats()
    catalog.ADAPTERS.set(model, to=stats.loaded)
    catalog.ADAPTER_BYTES.set(model, to=stats.bytes)
    _rose(catalog.ADAPTER_LOADS, stats.loads, model)
    _rose(catalog.ADAPTER_EVICTIONS, stats.evictions, model)


def _rose(counter: Counter, value: float, *labels: str) -> None:
    """A counter that the engine keeps; it never falls while the process lives."""
    counter.values[labels] = value


def _memory(model: str) -> None:
    """Host memory, and that of each CUDA device where the engine has begun to use it.

    torch is asked only if something else has loaded it.
    """
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0  # not Linux: prometheus-client's process_* are missing there too
    if pages:
        catalog.RESIDENT.set(model, to=pages * os.sysconf("SC_PAGE_SIZE"))
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    if not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        reserved = torch.cuda.memory_reserved(device)
        if reserved:
            catalog.GPU_MEMORY.set(str(device), to=reserved)
