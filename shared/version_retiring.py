"""The end of a version and of a whole model, decided as in `version_changes`. Pure.

A model that retires takes no new jobs. Once it has none left it loses its shares, its
versions drain and stop, and then all of it is forgotten. Each step may be made again.
"""

from msgspec.structs import replace

from .errors import VersionConflict
from .routes import Route
from .version_changes import Change, Decide, Specs, find, raised_route
from .version_records import RUNNING


def removed(model: str, version: str) -> Decide:
    """Decides to forget a version that nothing is sent to."""

    def decide(route: Route, specs: Specs, now_ms: int) -> Change:
        find(model, specs, version)
        share = route.shares.get(version, 0) or route.shadow.get(version, 0)
        if share:
            raise VersionConflict(
                f"version {version} of {model} gets {share:g} % of the jobs or of "
                "their copies; give those to another version first, or end the model "
                f"with tokenmill models retire {model}"
            )
        changed = replace(
            raised_route(route, now_ms),
            previous={} if version in route.previous else route.previous,
            weights={n: w for n, w in route.weights.items() if n != version},
        )
        return Change("remove", changed, None, version)

    return decide


def retiring(route: Route, _: Specs, now_ms: int) -> Change | None:
    """Decides that a model takes no new jobs, and that nothing is copied there."""
    if route.retiring:
        return None
    return Change(
        "route", replace(raised_route(route, now_ms), retiring=True, shadow={})
    )


def taken_back(route: Route, _: Specs, now_ms: int) -> Change | None:
    """Decides that a model which retires takes jobs after all."""
    if not route.retiring:
        return None
    return Change("route", replace(raised_route(route, now_ms), retiring=False))


def emptied(model: str) -> Decide:
    """Decides that nobody serves a model which retires, so that all may drain."""

    def decide(route: Route, _: Specs, now_ms: int) -> Change | None:
        _require_retiring(model, route)
        if not route.shares and not route.previous:
            return None
        return Change(
            "route", replace(raised_route(route, now_ms), shares={}, previous={})
        )

    return decide


def forgotten(model: str) -> Decide:
    """Decides to forget a model; None while a version of it may run."""

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        _require_retiring(model, route)
        running = any(spec.state in RUNNING for spec in specs.values())
        if not route.serial or running:
            return None
        return Change("forget", raised_route(route, now_ms))

    return decide


def _require_retiring(model: str, route: Route) -> None:
    if route.serial and not route.retiring:  # without a serial it is forgotten already
        raise VersionConflict(
            f"{model} was taken back meanwhile and does not retire any more"
        )
