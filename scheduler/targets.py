"""Which worker groups a job may go to: pins, outputs begun, and the route. Pure.

What a job needs of a group is one word, and a group offers a set of them, so that a
plan asks with one look-up. A job without needs goes to any group.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final, Protocol

from ..shared.routes import Route, Split

WEIGHTS_GRACE_S: Final = 60.0
"""A job whose output was begun with weights that no live group has waits so long for
a worker that restarts; those of registered versions are waited for without end."""
_KNOWN_OFFERS: Final = 4096


class _Group(Protocol):
    @property
    def version(self) -> str: ...
    @property
    def weights(self) -> str: ...


Line = tuple[str, str]
"""Version and weights of a group: groups of one line may have the same jobs."""


@lru_cache(maxsize=_KNOWN_OFFERS)
def offers_of(version: str, weights: str) -> frozenset[str]:
    """Returns the needs that a group satisfies.

    Args:
        version: Of the model, as the group announces it.
        weights: Its weights, likewise.
    """
    return frozenset((f"={version}", f"#{weights}", f"={version}#{weights}"))


class Targets:
    """Where jobs may go, from the route and the groups that live.

    Args:
        route: Who gets jobs without a pin.
        lines: Of the live groups.
        gone: Weights that nobody has any more and nobody waits for.
    """

    def __init__(
        self,
        route: Route | None = None,
        lines: Collection[Line] = (),
        gone: Collection[str] = (),
    ) -> None:
        self.shares: Mapping[str, float] = {} if route is None else route.shares
        self.gone = frozenset(gone)
        none: frozenset[str] = frozenset()
        self.offered = none.union(*(offers_of(*line) for line in lines))
        self._split = Split(self.shares)
        self.away = tuple(v for v in self._split.versions if not self._lives(v))
        """Versions with a share and without a live group."""
        live = {v: part for v, part in self.shares.items() if self._lives(v)}
        self._others = Split(live)
        self.spread = tuple(f"={version}" for version in self._others.versions)
        """What jobs without a pin need at present."""

    def _lives(self, version: str) -> bool:
        return f"={version}" in self.offered

    @property
    def routed(self) -> bool:
        """Whether jobs without a pin are not for every group."""
        return bool(self._split.versions)

    def version_of(self, job_id: str) -> str:
        """Returns the version that a job without a pin goes to; '' is any.

        Where that has no live group, the others with a share divide its jobs.
        """
        version = self._split.of(job_id)
        if version is None:
            return ""
        if version in self.away:
            return self._others.of(job_id) or version
        return version

    def needs(self, job_id: str, version: str, weights: str) -> str:
        """Returns what a group has to offer to a job; '' is nothing.

        Args:
            job_id: The job.
            version: Its pin, or ''.
            weights: What its output was begun with, or ''.
        """
        if weights and weights not in self.gone:
            return f"={version}#{weights}" if version else f"#{weights}"
        if not version:
            version = self.version_of(job_id)
        return f"={version}" if version else ""


class Aim:
    """Keeps `Targets` up to date.

    Args:
        monotonic: Local clock in seconds; replaced by tests.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._missing: dict[str, float] = {}
        """Weights that a job waits for -> since when no group has had them."""
        self._basis: tuple[object, ...] = ()
        self._targets = Targets()

    def targets(
        self, groups: Iterable[_Group], route: Route, wanted: Iterable[str] = ()
    ) -> Targets:
        """Returns where jobs may go now; the same object while nothing has changed.

        Args:
            groups: The live groups.
            route: Who gets jobs without a pin; without shares: everybody.
            wanted: Weights that outputs of waiting jobs were begun with.
        """
        lines = frozenset((group.version, group.weights) for group in groups)
        gone = self._gone(lines, route, wanted)
        basis = (lines, tuple(sorted(route.shares.items())), gone)
        if basis != self._basis:
            self._basis = basis
            self._targets = Targets(route, lines, gone)
        return self._targets

    def _gone(
        self, lines: Collection[Line], route: Route, wanted: Iterable[str]
    ) -> frozenset[str]:
        missing = set(wanted)
        if not missing and not self._missing:
            return frozenset()
        missing -= {weights for _, weights in lines}
        missing -= set(route.weights.values())
        now = self._monotonic()
        self._missing = {w: self._missing.get(w, now) for w in missing}
        return frozenset(
            weights
            for weights, since in self._missing.items()
            if now - since >= WEIGHTS_GRACE_S
        )
