"""Versions that Redis has lost, as by `FLUSHALL`, written down again. Pure.

Whoever follows a model keeps what it has seen. The newest shares that any has seen win,
told by `Route.since`: serials begin anew where all is lost, so they tell nothing.
"""

from msgspec.structs import replace

from .routes import Route
from .version_changes import Change, Decide, Specs


def is_lost(seen: Route, found: Route) -> bool:
    """Whether Redis has forgotten something between two looks at a model.

    A model that retires is forgotten on purpose.

    Args:
        seen: The route at the look before.
        found: As it is now; somebody else may have written it again.
    """
    if seen.retiring or found.retiring:
        return False
    return _is_older(found, seen) or found.restored_ms > seen.restored_ms


def restored(seen: Route) -> Decide:
    """Decides to write a route again; None where one as new is there."""

    def decide(route: Route, _: Specs, now_ms: int) -> Change | None:
        if route.retiring or not _is_older(route, seen):
            return None
        made = replace(
            seen,
            serial=max(route.serial, seen.serial) + 1,
            weights=route.weights,  # the others come with their versions
            draining=route.draining,  # likewise
            changed_ms=now_ms,
            restored_ms=max(now_ms, seen.restored_ms + 1),
        )
        return Change("restore", made)

    return decide


def _is_older(route: Route, seen: Route) -> bool:
    if not route.serial:
        return seen.serial > 0
    return bool(seen.shares) and route.since < seen.since
