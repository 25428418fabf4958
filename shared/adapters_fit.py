"""Which versions of a model can serve an adapter, as far as anyone was asked. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from .adapters import AdapterCard

MOST_CHECKED: Final = 16
"""Weights of which a card keeps what was said, the latest."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that get jobs, as one adapter finds them."""

    able: tuple[str, ...]
    unable: dict[str, str]
    """Version -> why it cannot serve the adapter."""
    unasked: tuple[str, ...]
    """Those of other weights, whose workers nobody has asked."""


def fit_of(card: AdapterCard, serving: Mapping[str, str]) -> Fit:
    """Returns which versions can serve an adapter.

    Args:
        card: The adapter.
        serving: Version -> its weights.
    """
    said = {name: _said(card, weights) for name, weights in sorted(serving.items())}
    return Fit(
        able=tuple(name for name, problem in said.items() if problem == ""),
        unable={name: problem for name, problem in said.items() if problem},
        unasked=tuple(name for name, problem in said.items() if problem is None),
    )


def _said(card: AdapterCard, weights: str) -> str | None:
    """What is wrong with an adapter on some weights; empty: nothing; None: unknown."""
    return "" if weights == card.base else card.checked.get(weights)


def noted(card: AdapterCard, said: Mapping[str, str]) -> AdapterCard:
    """Returns a card with what workers have said since.

    Args:
        card: As it is.
        said: Weights -> why they cannot serve it; empty: they can.
    """
    kept = {name: why for name, why in card.checked.items() if name not in said}
    all_said = {**kept, **said}
    all_said.pop(card.base, None)
    return replace(card, checked=dict(list(all_said.items())[-MOST_CHECKED:]))
