"""How many output tokens a worker makes, and how far apart: for people alone."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ..shared.metrics.catalog import INTER_TOKEN, OUTPUT_TOKENS
from ..shared.metrics.instruments import OTHER, Series
from ..shared.metrics.labels import know, model_label
from .engine.request import TokenDelta
from .jobs import Progress, RunningJob

WINDOW_S: Final = 10.0
"""A rate is over this long, or since the first token where that is less."""


class TokenRate:
    """Counts what the publisher is given.

    Args:
        model: Public name.
        clock: Seconds, rising.
    """

    def __init__(
        self, model: str = OTHER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if model != OTHER:
            know((model,))
        self._model = model_label(model)
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])
        """Time and total when each rate was asked for."""
        self._paces: dict[str, Series] = {}
        """Class -> its histogram: looked up once, observed at every delta."""
        self.total = 0

    def add(self, job: RunningJob, progress: Progress, delta: TokenDelta) -> None:
        """Counts one delta; the time since the last of its choice tells the pace."""
        count = len(delta.token_ids)
        if not count:
            return
        now, job_class = self._clock(), job.started.job_class
        self.total += count
        OUTPUT_TOKENS.add(self._model, job_class, by=count)
        if progress.last_at:
            paces = self._paces.get(job_class)
            if paces is None:
                paces = INTER_TOKEN.of(self._model, job_class)
                self._paces[job_class] = paces
            paces.observe((now - progress.last_at) / count, count)
        progress.last_at = now

    def per_second(self) -> float:
        """Returns the tokens a second over the last ten seconds or so."""
        now = self._clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        self._seen.append((now, self.total))
        return (self.total - before) / max(now - since, 1.0)
