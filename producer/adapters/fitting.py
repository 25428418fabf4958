"""Whether the versions of a model can serve its adapters: asked, and kept on the cards.

A card says on which weights its adapter was checked; workers of other weights are asked
when a version is to get jobs, and when an adapter is registered while several do.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.adapters import AdapterCard
from ...shared.adapters_fit import Fit, fit_of, noted
from ...shared.adapters_registry import AdapterRegistry
from ...shared.errors import (
    InvalidRequest,
    ModelUnavailable,
    ResultTimeout,
    TokenmillError,
    VersionConflict,
)
from ...shared.version_groups import live_groups
from ...shared.versions import Versions
from .asking import verdict_of

if TYPE_CHECKING:
    from ..session import Session

ALL_S: Final = 60.0
"""Longest that a switch waits for all verdicts together."""
FORCED_S: Final = 10.0
"""The same after a switch that was forced."""
_AT_ONCE: Final = 4
"""Reads at a time; a worker begins no more."""
_NAMED: Final = 5


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of a version have said of a model's adapters."""

    model: str
    version: str
    lost: dict[str, str]
    """Adapters that others serve now and this version cannot -> why."""
    unsure: list[str]
    """Those about which nobody has answered in time."""

    def problem(self) -> str:
        """Returns what is lost, as a person is told."""
        listed = "; ".join(
            f"{name} ({why})" for name, why in sorted(self.lost.items())[:_NAMED]
        )
        left = len(self.lost) - _NAMED
        more = f" and {left} more" if left > 0 else ""
        return (
            f"version {self.version} of {self.model} cannot serve {len(self.lost)} of "
            f"the model's adapters: {listed}{more}"
        )

    def require_all(self) -> None:
        """Refuses a version that cannot serve adapters which are served now.

        Raises:
            VersionConflict: Names the adapters, with the reasons.
        """
        if self.lost:
            raise VersionConflict(
                f"{self.problem()}. Remove them (tokenmill lora remove), keep their "
                "jobs to a version that serves them, or switch with --force: jobs "
                f"that get to {self.version} with them fail"
            )


async def ask_about_all(
    session: "Session", model: str, version: str, limit_s: float | None = None
) -> Answers:
    """Asks a version about all adapters that were checked on other weights than it has.

    What it says is kept on their cards.

    Args:
        session: The client's connections.
        model: Public name.
        version: That gets jobs; one without live workers knows nothing.
        limit_s: Longest wait for all answers together; None: a minute.
    """
    registry = AdapterRegistry(session.redis, model)
    cards = await session.patiently(registry.cards)
    live = await _live(session, model) if cards else {}
    weights = live.get(version, set())
    unsure = [card for card in cards if not all(_fits(card, one) for one in weights)]
    turns = asyncio.Semaphore(_AT_ONCE)
    rival = await _rival(session, model, version, live) if unsure else None
    limit_s = ALL_S if limit_s is None else limit_s
    deadline = asyncio.get_running_loop().time() + limit_s

    async def asked(card: AdapterCard) -> _Answer:
        async with turns:
            try:
                async with asyncio.timeout_at(deadline):
                    return await _ask(session, card, version, weights, rival)
            except (TimeoutError, ResultTimeout):
                return _Answer(card, answered=False)

    found = await asyncio.gather(*(asked(card) for card in unsure))
    told = [(one.card, one.said) for one in found if one.said]
    await session.patiently(lambda: registry.note(told))
    return Answers(
        model=model,
        version=version,
        lost={one.card.name: one.problem for one in found if one.is_lost},
        unsure=[one.card.name for one in found if not one.answered],
    )


async def tell_what_is_lost(
    session: "Session", model: str, version: str, tell: Callable[[str], None]
) -> None:
    """Says which adapters a version that gets jobs already cannot serve.

    Args:
        session: The client's connections.
        model: Public name.
        version: One that was switched to whatever it serves.
        tell: Told of it.
    """
    try:
        answers = await ask_about_all(session, model, version, FORCED_S)
    except TokenmillError as error:
        tell(f"{version} was not asked about adapters: {error}")
        return
    if answers.lost:
        tell(f"{answers.problem()}; jobs that get there with them fail")


def _fits(card: AdapterCard, weights: str) -> bool:
    return weights == card.base or card.checked.get(weights) == ""


class _Answer(msgspec.Struct, frozen=True):
    """Of one adapter."""

    card: AdapterCard
    said: dict[str, str] = {}
    """What is to be kept of it: weights -> what is wrong."""
    problem: str = ""
    is_lost: bool = False
    """Whether others serve it and this version does not."""
    answered: bool = True


async def _ask(
    session: "Session",
    card: AdapterCard,
    version: str,
    weights: set[str],
    rival: str | None,
) -> _Answer:
    try:
        verdict = await verdict_of(session, card.model, card.path, version=version)
        # A worker of a former release does not say with what it refuses.
        base = verdict.base or (min(weights) if len(weights) == 1 else "")
        if verdict.problem is None:
            # Other files by now say nothing of what was registered.
            same = verdict.digest == card.digest
            return _Answer(card, {base: ""} if same and base else {})
        said = {base: verdict.problem} if base else {}
        if rival is None:
            return _Answer(card, said)  # nobody serves it who could lose it
        serving = await verdict_of(session, card.model, card.path, version=rival)
    except ModelUnavailable:
        return _Answer(card)
    if serving.problem is not None:
        return _Answer(card)  # its files are gone, say
    return _Answer(card, said, verdict.problem, is_lost=True)


async def _rival(
    session: "Session", model: str, version: str, live: Mapping[str, set[str]]
) -> str | None:
    """The live version besides this one that gets most of the jobs, or got them before
    the last switch: what that serves, this one could lose.
    """
    route, _ = await session.patiently(Versions(session.redis, model).read)
    shares = {**route.previous, **route.shares} or dict.fromkeys(live, 0.0)
    others = [name for name in sorted(shares) if name != version and live.get(name)]
    return max(others, key=lambda name: shares[name], default=None)


async def _live(session: "Session", model: str) -> dict[str, set[str]]:
    """Weights of the live workers, by version."""
    pool = await session.patiently(session.view.pool)
    groups = await session.patiently(
        lambda: live_groups(session.redis, model, pool.partitions)
    )
    found: dict[str, set[str]] = {}
    for one in groups:
        if not one.draining:
            found.setdefault(one.version, set()).add(one.weights_version)
    return found


async def fits_of(session: "Session", cards: Sequence[AdapterCard]) -> list[Fit]:
    """Returns for each adapter which versions that get jobs can serve it.

    Of models without shares, and of versions that nobody has described, nothing is
    known.
    """
    serving: dict[str, dict[str, str]] = {}
    for model in sorted({card.model for card in cards}):
        route, specs = await session.patiently(Versions(session.redis, model).read)
        weights = {name: spec.weights_version for name, spec in specs.items()}
        serving[model] = {
            name: known for name in route.shares if (known := weights.get(name))
        }
    return [fit_of(card, serving[card.model]) for card in cards]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What the other versions that get jobs have said of one checkpoint."""

    said: dict[str, str]
    """Weights -> why they cannot serve it; empty: they can."""
    refused: dict[str, str]
    """Version -> why it cannot serve it."""
    unsure: list[str]
    """Versions of which nobody has answered."""

    def noted_on(self, card: AdapterCard, *, force: bool) -> AdapterCard:
        """Returns the card with all that, as it is registered.

        Raises:
            InvalidRequest: A version cannot serve it, and that is not forced.
        """
        if self.refused and not force:
            versions = ", ".join(sorted(self.refused))
            raise InvalidRequest(
                "adapter",
                f"'{card.name}' is refused: of the versions of {card.model} that get "
                f"jobs, {_reasons(self.refused)}. Give their jobs to a version that "
                "serves it, or register it with --force: jobs that get to "
                f"{versions} with it fail",
            )
        notes = [*card.notes]
        if self.refused:
            notes.append(f"jobs that get there fail: {_reasons(self.refused)}")
        if self.unsure:
            notes.append(f"not checked on {', '.join(self.unsure)}: nobody answered")
        return noted(msgspec.structs.replace(card, notes=tuple(notes)), self.said)


def _reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(
        f"{version} cannot serve it ({why})" for version, why in sorted(refused.items())
    )


async def ask_the_others(
    session: "Session", model: str, path: str, base: str
) -> Verdicts:
    """Asks each version that gets jobs about a checkpoint which one has accepted.

    Args:
        session: The client's connections.
        model: Public name.
        path: Directory of the checkpoint, as workers see it.
        base: Weights of the worker that has accepted it.
    """
    live = await _live(session, model)
    route = await session.patiently(Versions(session.redis, model).route)
    shares: Mapping[str, float] = {} if route is None else route.shares
    others = [v for v in sorted(shares or live) if base not in live.get(v, {base})]
    said: dict[str, str] = {}
    refused: dict[str, str] = {}
    away = [v for v in sorted(shares) if not live.get(v)]

    async def ask(version: str) -> None:
        try:
            verdict = await verdict_of(session, model, path, version=version)
        except (ModelUnavailable, ResultTimeout):
            away.append(version)
            return
        if verdict.base:
            said[verdict.base] = verdict.problem or ""
        if verdict.problem is not None:
            refused[version] = verdict.problem

    await asyncio.gather(*(ask(version) for version in others))
    return Verdicts(said=said, refused=refused, unsure=sorted(away))
