"""Whether a version of a model can serve the adapters that the model has."""

import asyncio
from typing import TYPE_CHECKING, Final

from ...shared.adapters import AdapterCard
from ...shared.adapters_registry import AdapterRegistry
from ...shared.errors import ModelUnavailable, ResultTimeout, VersionConflict
from ...shared.version_groups import live_groups
from .asking import verdict_of

if TYPE_CHECKING:
    from ..session import Session

ALL_S: Final = 60.0
"""Longest that a switch waits for all verdicts together."""
_AT_ONCE: Final = 4
"""Reads at a time; a worker begins no more."""
_NAMED: Final = 5


async def require_adapters(session: "Session", model: str, version: str) -> list[str]:
    """Refuses a version that cannot serve adapters which are served now.

    Its workers are asked about all that were checked on other weights than its own.

    Args:
        session: The client's connections.
        model: Public name.
        version: That is to get jobs; one without live workers is let pass.

    Returns:
        Names of adapters about which nobody has answered in time.

    Raises:
        VersionConflict: Names the adapters, with the reasons.
    """
    cards = await session.patiently(AdapterRegistry(session.redis, model).cards)
    if not cards:
        return []
    pool = await session.patiently(session.view.pool)
    groups = await session.patiently(
        lambda: live_groups(session.redis, model, pool.partitions)
    )
    weights = {one.weights_version for one in groups if one.version == version}
    unsure = [card for card in cards if not weights <= {card.base}]
    if not unsure:
        return []
    turns = asyncio.Semaphore(_AT_ONCE)
    deadline = asyncio.get_running_loop().time() + ALL_S

    async def lost(card: AdapterCard) -> str | None:
        """Why the version cannot serve it, if others do; empty without an answer."""
        async with turns:
            try:
                async with asyncio.timeout_at(deadline):
                    return await _why_lost(session, card, version)
            except (TimeoutError, ResultTimeout):
                return ""

    found = await asyncio.gather(*(lost(card) for card in unsure))
    reasons = {card.name: why for card, why in zip(unsure, found, strict=True) if why}
    if reasons:
        raise _cannot_serve(model, version, reasons)
    return [card.name for card, why in zip(unsure, found, strict=True) if why == ""]


async def _why_lost(session: "Session", card: AdapterCard, version: str) -> str | None:
    """What the version says against an adapter; None if it, or nobody, serves it."""
    try:
        verdict = await verdict_of(session, card.model, card.path, version=version)
        if verdict.problem is None:
            return None
        serving = await verdict_of(session, card.model, card.path)
    except ModelUnavailable:
        return None
    return verdict.problem if serving.problem is None else None


def _cannot_serve(model: str, version: str, reasons: dict[str, str]) -> VersionConflict:
    listed = "; ".join(
        f"{name} ({why})" for name, why in sorted(reasons.items())[:_NAMED]
    )
    more = f" and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return VersionConflict(
        f"version {version} of {model} cannot serve {len(reasons)} of the model's "
        f"adapters: {listed}{more}. Remove them (tokenmill lora remove), keep their "
        "jobs to a version that serves them, or switch with --force: jobs that get "
        f"to {version} with them fail"
    )
