"""The progress of a group: as far as its slowest rank."""

import threading
from collections.abc import Callable

Progress = Callable[[str, float], None]


class LeastProgress:
    """Joins the progress of all ranks, which come from several threads.

    Args:
        size: Ranks.
        report: Called with a stage and its fraction done, when that has grown.
    """

    def __init__(self, size: int, report: Progress) -> None:
        self._size = size
        self._report = report
        self._lock = threading.Lock()
        self._done: dict[str, list[float]] = {}
        self._told: dict[str, float] = {}

    def update(self, rank: int, stage: str, fraction: float) -> None:
        """Enters how far a rank is.

        Args:
            rank: From 0.
            stage: What it does; all ranks have the same stages.
            fraction: 0 to 1.
        """
        with self._lock:
            done = self._done.setdefault(stage, [0.0] * self._size)
            done[rank] = fraction
            least = min(done)
            if least <= self._told.get(stage, 0.0):
                return
            self._told[stage] = least
            self._report(stage, least)
