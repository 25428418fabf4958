"""How long a request takes in a replica that runs several at once, and how many a
second replicas serve within a target.

All requests are alike. Each needs the steps of its prompt's chunks and one step for
every output token after the first; beside it the others do the same, so a part of the
steps it lives through carry somebody's chunk and take longer.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from .pace import Replica
from .queueing import wait_quantile

PART: Final = 0.99
"""The quantile that a target is for."""
VARIATION: Final = 1.0
"""Squared coefficient of variation of service times: real requests differ in length."""
_Z: Final = 2.326
"""Standard deviations above the mean that 99 % stay below."""
_HALVINGS: Final = 24
_LEAST_CHUNK: Final = 16
_STEP_TARGET: Final = 2.0
"""A step with a chunk takes at most so many times one without: the engine's default."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What every request is like."""

    prompt: int
    """Tokens."""
    output: int

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.prompt + self.output


class Service:
    """Replicas that run at most so many requests each.

    Args:
        replica: One of them.
        request: What is asked of them.
        running: Sequences at once in a replica.
        chunk: Prompt tokens of a step at most.
        replicas: How many there are.
        window_s: Longest that the scheduler waits for a fuller batch.
    """

    def __init__(
        self,
        replica: Replica,
        request: Request,
        *,
        running: int,
        chunk: int,
        replicas: int,
        window_s: float = 0.0,
    ) -> None:
        self.replica = replica
        self.request = request
        self.running = running
        self.replicas = replicas
        self._chunk = chunk
        self._window_s = window_s
        self._lives: dict[int, float] = {}

    def decode_s(self, running: int) -> float:
        """Returns the seconds of a step in which so many sequences make a token."""
        context = self.request.prompt + self.request.output // 2
        return self.replica.step(running, context).total

    def mixed_s(self, running: int, chunk: int) -> float:
        """Returns the seconds of a step with a chunk beside the other sequences."""
        context = self.request.prompt + self.request.output // 2
        seen = self.request.prompt // 2
        return self.replica.step(running - 1, context, chunk, seen).total

    def chunk_beside(self, running: int) -> int:
        """Returns the prompt tokens that a step takes beside sequences that decode."""
        chunk = min(self._chunk, self.request.prompt)
        most = _STEP_TARGET * self.decode_s(running)
        while chunk > _LEAST_CHUNK and running > 1:
            if self.mixed_s(running, chunk) <= most:
                break
            chunk = max(_LEAST_CHUNK, chunk // 2)
        return chunk

    def life_s(self, running: int) -> float:
        """Returns how long a request takes while so many run in its replica.

        Args:
            running: Its own included, always as many.
        """
        found = self._lives.get(running)
        if found is None:
            found = self._lives[running] = self._life_s(running)
        return found

    def _life_s(self, running: int) -> float:
        chunk = self.chunk_beside(running)
        chunks = -(-self.request.prompt // chunk)
        steps = chunks + self.request.output - 1
        with_chunk = self.mixed_s(running, -(-self.request.prompt // chunks))
        mixed = running * chunks
        if mixed >= steps:  # prompts alone fill the time
            return mixed * with_chunk
        return mixed * with_chunk + (steps - mixed) * self.decode_s(running)

    def first_token_s(self, running: int) -> float:
        """Returns the seconds until a prompt's chunks have run, one a step."""
        chunk = self.chunk_beside(running)
        return -(-self.request.prompt // chunk) * self.mixed_s(running, chunk)

    @property
    def wait_s(self) -> float:
        """Most that the scheduler lets a request wait: half a step at the most."""
        return min(self._window_s, self.decode_s(self.running) / 2)

    @property
    def full_s(self) -> float:
        """A request's time with all slots taken."""
        return self.wait_s + self.life_s(self.running)

    @property
    def most(self) -> float:
        """Requests a second with every slot always taken."""
        return self.replicas * self.running / self.life_s(self.running)

    def p99_s(self, rate: float) -> float:
        """Returns the 99th percentile of a request's time at a rate of arrivals.

        Args:
            rate: Requests a second over all replicas, at random times (Poisson).
        """
        if rate >= self.most:
            return math.inf
        occupied = self._occupied(rate)
        peak = math.ceil(occupied + _Z * math.sqrt(occupied))
        busiest = max(1, min(self.running, peak))
        queued = wait_quantile(
            PART,
            self.running * self.replicas,
            occupied * self.replicas,
            self.life_s(self._whole(occupied)),
            VARIATION,
        )
        return self.wait_s + queued + self.life_s(busiest)

    def _whole(self, occupied: float) -> int:
        return max(1, min(self.running, math.ceil(occupied)))

    def _occupied(self, rate: float) -> float:
        """Returns the mean sequences in a replica by Little's law, which the time of
        a request depends on in turn.
        """
        low, high = 0.0, float(self.running)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            needed = rate / self.replicas * self.life_s(self._whole(middle))
            low, high = (middle, high) if needed > middle else (low, middle)
        return high

    def sustained(self, slo_s: float | None) -> float:
        """Returns the most requests a second whose 99th percentile keeps a target.

        Args:
            slo_s: The target; None lets a request wait as long as it runs.
        """
        limit = 2 * self.full_s if slo_s is None else slo_s
        low, high = 0.0, self.most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.p99_s(middle) <= limit else (low, middle)
        return low
