"""What a producer sees of a version."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ...shared.health_set import HealthReport
from ...shared.shadow_report import ShadowReport

if TYPE_CHECKING:
    from ...shared.adapters import AdapterCard
    from ...shared.routes import Route
    from ...shared.version_groups import LiveGroup
    from ...shared.versions import VersionSpec


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a model and how it is."""

    model: str
    version: str
    state: str
    """`added`, `loading`, `ready`, `failed`, `draining` or `stopped`; `undescribed`:
    workers serve it that nobody has described to the pool."""
    reason: str = ""
    failures: dict[str, str] = {}
    """Host -> why it cannot load the version; others may have it all the same."""
    share: float | None = None
    """Percent of new jobs; None: the model has no route, every version serves."""
    shadow_percent: float = 0.0
    """Percent of the traffic that is copied to it."""
    retiring: bool = False
    """Whether its model takes no new jobs any more."""
    groups: int = 0
    """Live workers."""
    running: int = 0
    """Sequences that they hold."""
    weights_version: str | None = None
    path: str | None = None
    health_checks: int = 0
    """Size of its health set; 0: it has none."""
    health: HealthReport | None = None
    shadow: ShadowReport | None = None
    unserved_adapters: tuple[str, ...] = ()
    """Those of its model that its workers have said they cannot serve."""
    updated_ms: int = 0


def version_infos(
    model: str,
    route: "Route",
    specs: "dict[str, VersionSpec]",
    groups: "Sequence[LiveGroup]",
    reports: dict[str, ShadowReport],
) -> list[VersionInfo]:
    """Puts together what is known of a model's versions, by name."""
    names = {*specs, *route.shares, *(one.version for one in groups)}
    found = []
    for name in sorted(names):
        spec = specs.get(name)
        live = [one for one in groups if one.version == name]
        weights = spec.weights_version if spec else None
        if live:
            weights = live[0].weights_version
        health = spec.health if spec else None
        found.append(
            VersionInfo(
                model=model,
                version=name,
                state=spec.state if spec else "undescribed",
                reason=spec.reason if spec else "",
                failures=spec.failures if spec else {},
                share=route.shares.get(name, 0.0) if route.shares else None,
                shadow_percent=route.shadow.get(name, 0.0),
                retiring=route.retiring,
                groups=len(live),
                running=sum(one.running for one in live),
                weights_version=weights,
                path=spec.model.path if spec else None,
                health_checks=len(health.checks) if health else 0,
                health=spec.health_report if spec else None,
                shadow=reports.get(name),
                updated_ms=spec.updated_ms if spec else 0,
            )
        )
    return found


def where_not(failures: Mapping[str, str]) -> str:
    """Returns where a version cannot be loaded, which others may have all the same.

    Args:
        failures: Host -> why.

    Returns:
        As people read it; empty where it has failed nowhere.
    """
    if not failures:
        return ""
    reasons = (f"{host}: {reason}" for host, reason in failures.items())
    return f"it cannot be loaded on {'; '.join(reasons)}"


def with_unserved(
    infos: Sequence[VersionInfo], cards: "Sequence[AdapterCard]"
) -> list[VersionInfo]:
    """Adds what is known of the adapters that a model's versions cannot serve.

    Args:
        infos: The versions of one model.
        cards: Its adapters.
    """
    from ...shared.adapters_fit import fit_of

    found = []
    for info in infos:
        own = {info.version: info.weights_version or ""}
        names = [card.name for card in cards if fit_of(card, own).unable]
        found.append(msgspec.structs.replace(info, unserved_adapters=tuple(names)))
    return found
