"""The least time that a decode step can take: the "roofline" of Williams et al., 2009.

A step reads every weight and the keys and values of all running sequences once, and
multiplies each row with every weight of its linear layers. It lasts as long as the
slower of the two, at least.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What a step has to do."""

    read_bytes: int
    products: int = 0
    """Multiply-adds of linear layers; 0 is not known."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What a device can do."""

    bandwidth: float
    """Bytes a second of its memory."""
    compute: Mapping[str, float] = {}
    """Multiply-adds a second by precision of weights; those that lack are not known."""


def floor_ms(step: Step, speed: Speed, weights: str) -> float:
    """Returns the least milliseconds of a step.

    Args:
        step: What it has to do.
        speed: Of the device.
        weights: Precision.
    """
    return max(_read_ms(step, speed), _compute_ms(step, speed, weights) or 0.0)


def explain(step: Step, speed: Speed, weights: str) -> str:
    """Returns where the floor comes from, and what it leaves out.

    Args:
        step: What it has to do.
        speed: Of the device.
        weights: Precision.
    """
    read = _read_ms(step, speed)
    compute = _compute_ms(step, speed, weights)
    source = f"the bytes it reads at {speed.bandwidth / 1e9:.3g} GB/s"
    if compute is None:
        return f"{source}; compute is not counted"
    rate = speed.compute[weights] / 1e9
    products = f"its multiply-adds at {rate:.3g} G/s ({compute:.3g} ms)"
    if compute > read:
        return f"{products}, more than {source} ({read:.3g} ms)"
    return f"{source}, more than {products}"


def _read_ms(step: Step, speed: Speed) -> float:
    return 1000 * step.read_bytes / speed.bandwidth


def _compute_ms(step: Step, speed: Speed, weights: str) -> float | None:
    rate = speed.compute.get(weights)
    return 1000 * step.products / rate if rate and step.products else None
