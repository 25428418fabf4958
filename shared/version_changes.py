"""What may be changed in the versions of a model, decided from what there is. Pure.

Each function returns a decision: called with the route, the versions and the time, it
gives the change to write, or None where nothing is to be changed. It is asked again
when somebody else was faster.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import msgspec

from .config_model import ModelConfig
from .errors import UnknownVersion, VersionConflict
from .health_set import HealthReport
from .routes import (
    Route,
    check_percent,
    check_shares,
    check_version_name,
    who_serves,
    with_share,
)
from .version_records import MAY_RUN, VersionSpec, VersionState

Specs = Mapping[str, VersionSpec]


class Change(msgspec.Struct, frozen=True):
    """What the script `route_change` is to write."""

    action: Literal["fix", "add", "put", "set", "remove", "route", "restore", "forget"]
    route: Route
    spec: VersionSpec | None = None
    version: str = ""


Decide = Callable[[Route, Specs, int], Change | None]


def fixed(shares: Mapping[str, float]) -> Decide:
    """Decides to write down who serves a model that has no shares yet."""
    wanted = check_shares(shares)

    def decide(route: Route, _: Specs, now_ms: int) -> Change | None:
        if route.shares or route.retiring:
            return None
        # A guess: less than all that was ever switched, and than an earlier guess.
        since = route.since + 1 if route.since else -now_ms
        made = msgspec.structs.replace(_shared(route, wanted, now_ms), since=since)
        return Change("fix", made)

    return decide


def added(model: str, spec: VersionSpec, *, replace: bool) -> Decide:
    """Decides to add a version, or to put another in its place."""
    check_version_name(spec.version)

    def decide(route: Route, specs: Specs, now_ms: int) -> Change:
        known = specs.get(spec.version)
        if known is not None and not replace:
            raise VersionConflict(
                f"the version name {spec.version} of {model} is in use (it is "
                f"{known.state}); choose another, or remove that one first"
            )
        share = route.shares.get(spec.version)
        if share and spec.state == "added" and not replace:
            raise VersionConflict(
                f"the version name {spec.version} of {model} is in use: workers that "
                f"nobody has described get {share:g} % of the jobs; choose another"
            )
        created_ms = known.created_ms if known else now_ms
        made = msgspec.structs.replace(spec, created_ms=created_ms, updated_ms=now_ms)
        action: Literal["add", "put"] = "put" if replace else "add"
        return Change(action, raised_route(route, now_ms, made), made, spec.version)

    return decide


def stated(
    model: str,
    version: str,
    state: VersionState,
    *,
    reason: str,
    only_from: Collection[str] | None,
    weights_version: str | None,
    health_report: HealthReport | None,
) -> Decide:
    """Decides to say how a version is; None where it is in no state of `only_from`, or
    all of it is known.
    """

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        known = find(model, specs, version)
        if only_from is not None and known.state not in only_from:
            return None
        if state == "loading" != known.state:
            known = msgspec.structs.replace(known, failures={}, load_ms=now_ms)
        made = msgspec.structs.replace(
            known,
            state=state,
            reason=reason,
            weights_version=weights_version or known.weights_version,
            health_report=health_report or known.health_report,
        )
        if made == specs[version]:
            return None  # as others have said: many workers say so at the same moment
        made = msgspec.structs.replace(made, updated_ms=now_ms)
        return Change("set", raised_route(route, now_ms, made), made, version)

    return decide


def renewed(model: str, version: str, config: ModelConfig) -> Decide:
    """Decides to record other settings of a version; None where they are the same."""

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        known = find(model, specs, version)
        if known.model == config:
            return None
        made = msgspec.structs.replace(known, model=config, updated_ms=now_ms)
        return Change("set", raised_route(route, now_ms, made), made, version)

    return decide


def switched(model: str, shares: Mapping[str, float]) -> Decide:
    """Decides to give new jobs to other versions, all of which have to be ready."""
    wanted = check_shares(shares)

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        _require_ready(model, route, specs, wanted)
        if wanted == route.shares:
            return None
        return Change("route", _shared(route, wanted, now_ms))

    return decide


def moved(model: str, version: str, percent: float) -> Decide:
    """Decides to give a version a share, and what is left to the others as they are."""
    check_version_name(version)
    check_percent(version, percent)

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        if version not in {**route.shares, **route.previous}:
            find(model, specs, version)
        shares = with_share(route.shares, version, percent)
        return switched(model, shares)(route, specs, now_ms)

    return decide


def rolled_back(model: str, seen: Route) -> Decide:
    """Decides to give new jobs to whom they went before the last switch.

    Args:
        model: Public name.
        seen: What is to be undone. Where somebody has undone it already, nothing is
            changed: to go back twice is to go forward again.
    """

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        if _sides(route) != _sides(seen):
            if _sides(route) == _sides(seen)[::-1]:
                return None
            raise VersionConflict(
                f"the shares of {model} have changed meanwhile, its jobs go to "
                f"{who_serves(route.shares)}; look again and decide anew"
            )
        if not route.previous:
            raise VersionConflict(
                f"{model} has no earlier shares to go back to; its jobs go to "
                f"{who_serves(route.shares)}: say what is wanted with a switch"
            )
        _require_ready(model, route, specs, route.previous)
        return Change("route", _shared(route, route.previous, now_ms))

    return decide


def _sides(route: Route) -> tuple[dict[str, float], dict[str, float]]:
    return route.shares, route.previous


def shadowed(model: str, version: str, percent: float) -> Decide:
    """Decides to copy a part of the traffic to a version; 0 ends it."""
    check_percent(version, percent)

    def decide(route: Route, specs: Specs, now_ms: int) -> Change:
        shadow = {name: part for name, part in route.shadow.items() if name != version}
        if percent > 0:
            _require_ready(model, route, specs, {version: percent})
            shadow[version] = percent
        raised = raised_route(route, now_ms)
        return Change("route", msgspec.structs.replace(raised, shadow=shadow))

    return decide


def find(model: str, specs: Specs, version: str) -> VersionSpec:
    """Returns a version that was added.

    Raises:
        InvalidRequest: No version can be called so.
        UnknownVersion: There is no such version.
    """
    spec = specs.get(version)
    if spec is None:
        check_version_name(version)
        names = ", ".join(sorted(specs)) or "none"
        raise UnknownVersion(
            f"there is no version {version} of {model}; known: {names}. Add it with "
            f"tokenmill models add {model} {version}"
        )
    return spec


def _require_ready(
    model: str, route: Route, specs: Specs, shares: Mapping[str, float]
) -> None:
    named = {*route.shares, *route.previous}
    for version in sorted(shares):
        if version not in specs and version in named:
            continue  # served by workers that nobody has described
        spec = find(model, specs, version)
        if spec.state != "ready":
            why = f" ({spec.reason})" if spec.reason else ""
            raise VersionConflict(
                f"version {version} of {model} is {spec.state}{why}; only one that is "
                "ready may get jobs: load it first"
            )


def raised_route(route: Route, now_ms: int, spec: VersionSpec | None = None) -> Route:
    """The route after a change, with a version's weights and whether it drains."""
    weights, draining = dict(route.weights), set(route.draining)
    if spec is not None:
        weights.pop(spec.version, None)
        if spec.weights_version and spec.state in MAY_RUN:
            weights[spec.version] = spec.weights_version
        draining.discard(spec.version)
        if spec.state == "draining":
            draining.add(spec.version)
    return msgspec.structs.replace(
        route,
        serial=route.serial + 1,
        weights=weights,
        draining=tuple(sorted(draining)),
        changed_ms=now_ms,
    )


def _shared(route: Route, shares: Mapping[str, float], now_ms: int) -> Route:
    return msgspec.structs.replace(
        raised_route(route, now_ms),
        shares=dict(shares),
        previous=dict(route.shares),
        since=max(now_ms, route.since + 1),
    )
