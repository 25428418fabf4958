"""The end of a version and of a whole model, decided as in `version_changes`. Pure.

A model that retires takes no new jobs. Once it has none left it loses its shares, its
versions drain and stop, and then all of it is forgotten. Each step may be made again.
"""

from collections.abc import Mapping

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
            draining=tuple(name for name in route.draining if name != version),
        )
        return Change("remove", changed, None, version)

    return decide


def drained(model: str, version: str) -> Decide:
    """Decides to have a version end; None where it does not run.

    One that has a share by now is refused: its jobs would have nobody.
    """

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        known = find(model, specs, version)
        if route.shares.get(version):
            raise VersionConflict(why_not_drained(model, version, route.shares, specs))
        if known.state not in ("loading", "ready", "draining"):
            return None
        made = replace(known, state="draining", reason="", updated_ms=now_ms)
        raised = raised_route(route, now_ms, made)
        shadow = {name: part for name, part in route.shadow.items() if name != version}
        changed = replace(raised, shadow=shadow)
        return Change("set", changed, made, version)

    return decide


def why_not_drained(
    model: str, version: str, shares: Mapping[str, float], specs: Specs
) -> str:
    """Returns why a version with a share cannot end, and what would help."""
    found = f"version {version} of {model} gets {shares[version]:g} % of its jobs"
    command = f"tokenmill models switch {model}"
    others = sorted((n for n in shares if n != version), key=lambda n: -shares[n])
    usable = [n for n in others if n not in specs or specs[n].state == "ready"]
    if others and usable == others:
        return (
            f"{found}; first {command} {version} --percent 0, which divides them "
            f"among those that serve beside it ({', '.join(others)})"
        )
    ready = sorted(n for n, s in specs.items() if s.state == "ready" and n != version)
    if usable or len(ready) == 1:
        return f"{found}; first {command} {(usable or ready)[0]}"
    if ready:
        names = " or ".join(ready)
        return f"{found}; first {command} VERSION, the one that is to get them: {names}"
    return (
        f"{found} and is the only one that could; load another and {command} to "
        f"it, or end the model altogether with tokenmill models retire {model}"
    )


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
