"""Hosts on which a version cannot be loaded: it has failed where none is left. Pure."""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from .routes import Route
from .version_changes import Change, Decide, Specs, find, raised_route
from .version_records import RUNNING

_MOST_HOSTS: Final = 16
"""Hosts whose reasons are kept, the latest."""
_REASON: Final = 600
"""Characters of a reason that are kept."""


def failed_on(
    model: str, version: str, host: str, reason: str, *, is_last: bool
) -> Decide:
    """Decides to note that a host cannot load a version; None where that is known.

    Args:
        model: Public name.
        version: Which.
        host: As people know it.
        reason: Why.
        is_last: Nobody serves the version, and nobody else loads it: it has failed.
    """

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        known = find(model, specs, version)
        others = [one for one in known.failures.items() if one[0] != host]
        failures = dict([*others, (host, reason[:_REASON])][-_MOST_HOSTS:])
        if known.state not in RUNNING or not (is_last or failures != known.failures):
            return None
        made = replace(known, failures=failures, updated_ms=now_ms)
        if is_last:
            made = replace(made, state="failed", reason=_together(failures))
        return Change("set", raised_route(route, now_ms, made), made, version)

    return decide


def forgiven(model: str, version: str, host: str) -> Decide:
    """Decides to forget that a host could not load a version, as it tries again."""

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        known = find(model, specs, version)
        if host not in known.failures:
            return None
        left = {name: why for name, why in known.failures.items() if name != host}
        made = replace(known, failures=left, updated_ms=now_ms)
        return Change("set", raised_route(route, now_ms, made), made, version)

    return decide


def tried_again(model: str, version: str) -> Decide:
    """Decides that a version is loaded again where it has failed."""

    def decide(route: Route, specs: Specs, now_ms: int) -> Change | None:
        known = find(model, specs, version)
        if not known.failures:
            return None
        made = replace(known, failures={}, load_ms=now_ms, updated_ms=now_ms)
        return Change("set", raised_route(route, now_ms, made), made, version)

    return decide


def _together(failures: Mapping[str, str]) -> str:
    """Why a version has failed: the reason of its only host, or those of all."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    return "no host can load it. " + " ".join(
        f"{host}: {reason}." for host, reason in failures.items()
    )
