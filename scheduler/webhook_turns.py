"""Whose turn it is: hosts that hang must not hold up the webhooks of others.

A host has a few places of its own. A tenant may name any number of hosts, so what its
deliveries hold is bound, too.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PER_TARGET: Final = 8
"""Attempts at once to one host."""
SHORTEST_S: Final = 0.2
LONGEST_S: Final = 60.0
"""A host that hung and answers again is sent what waited for it within this time."""
MOST_TARGETS: Final = 1000
"""Hosts that are remembered; those that nothing waits for go first."""
_NEWEST: Final = 0.25
"""Weight of the last attempt in how long one takes."""


class _Target:
    """The places of one host, by `time.monotonic`."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.took_s = 0.0
        self.next_free = 0.0
        """When the next place is free that is promised to nobody."""

    def is_idle(self, now: float) -> bool:
        """Whether nothing runs and nothing was told to come back."""
        return not self.begun and self.next_free <= now

    def reserve_s(self, now: float) -> float:
        """Promises a place; returns the seconds until it is free."""
        # All that run have taken as long as the newest of them already.
        running_s = now - max(self.begun, default=now)
        self.next_free = max(self.next_free, now)
        self.next_free += max(self.took_s, running_s) / PER_TARGET
        return self.next_free - now


class Turns:
    """Places for attempts, a few for each host.

    A delivery that finds none is told to come back when its turn may be: after as long
    as those before it take at the pace of the host. So many deliveries to a host that
    hangs hardly ask, and many to a quick one are soon done.
    """

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}

    def has_any(self, target: str) -> bool:
        """Whether an attempt goes to this host now."""
        one = self._targets.get(target)
        return one is not None and bool(one.begun)

    def wait_s(self, target: str) -> float | None:
        """Returns the seconds until a host may have a place; None when it has one."""
        one = self._targets.get(target)
        if one is None or len(one.begun) < PER_TARGET:
            return None
        now = time.monotonic()
        wait_s = one.reserve_s(now)
        if wait_s > LONGEST_S:
            one.next_free = now + LONGEST_S
            # Many are told so: they must not all come at the same moment.
            return random.uniform(LONGEST_S / 2, LONGEST_S)  # noqa: S311 - no secret
        return max(wait_s, random.uniform(SHORTEST_S, 2 * SHORTEST_S))  # noqa: S311

    @contextmanager
    def place(self, target: str) -> Iterator[None]:
        """Takes a place of a host, for the length of a block."""
        if len(self._targets) >= MOST_TARGETS:
            self._forget()
        one = self._targets.setdefault(target, _Target())
        begun = time.monotonic()
        one.begun.append(begun)
        try:
            yield
        finally:
            one.begun.remove(begun)
            now = time.monotonic()
            one.took_s += _NEWEST * (now - begun - one.took_s)
            if one.is_idle(now):
                self._targets.pop(target, None)

    def _forget(self) -> None:
        now = time.monotonic()
        for target in [name for name, one in self._targets.items() if one.is_idle(now)]:
            del self._targets[target]


def has_share(held: int, free: int, *, is_new: bool) -> bool:
    """Whether a tenant may have one more place: while more are left than it has.

    A tenant alone so has half of all places, and one that comes later half of what is
    left; where many want some at the same time, each has as many as are left over.

    Args:
        held: Places that the tenant has.
        free: Places that nobody has.
        is_new: It is for a host that has none: then the tenant may have twice as many,
            two thirds of all, so that its own hosts that hang hold up no other of it.
    """
    return held < (2 * free if is_new else free)
