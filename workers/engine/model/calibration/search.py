"""Chooses scales that lower the estimated loss, and the layers that stay costly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from ...kernels.reference import quantize_channels

if TYPE_CHECKING:
    from .statistics import HeadStatistics

STEPS: Final = 60
RATE: Final = 0.05
_ROWS: Final = 4096
"""Rows of a weight looked at while searching; the head has many more."""
_PART: Final = 1024
SHARE: Final = 0.05
"""Of the linear layers, and of their weights, that may keep a second plane."""
WORTH: Final = 0.01
"""Share of the whole loss below which a layer is not worth a second plane."""
_FLOOR: Final = 1e-12
Loss = Callable[[torch.Tensor], torch.Tensor]


def input_scale(
    weight: torch.Tensor, energy: torch.Tensor, spread: torch.Tensor
) -> torch.Tensor:
    """Returns factors on a weight's columns that rounding per row suffers least from.

    A row's error is its largest value over 127, uniform, so the loss is
    sum_o energy_o * max_i(w_oi s_i)^2 times sum_i spread_i / s_i^2.

    Args:
        weight: float32 [out, in].
        energy: float32 [out], of gradients.
        spread: float32 [in], of inputs: second moments or variances.

    Returns:
        float32 [in], geometric mean 1.
    """
    step = -(-len(weight) // _ROWS)
    sizes, energy = weight[::step].abs(), energy[::step].clamp_min(_FLOOR)
    spread = spread.clamp_min(float(spread.max()) * 1e-9 + _FLOOR)

    def loss(scale: torch.Tensor) -> torch.Tensor:
        largest = (sizes * scale).amax(dim=1)
        rounding = (energy * largest.square()).sum().clamp_min(_FLOOR).log()
        return rounding + (spread / scale.square()).sum().log()

    columns = sizes.amax(dim=0).clamp_min(float(sizes.max()) * 1e-4 + _FLOOR)
    return _searched(0.15 * spread.log() - 0.25 * columns.log(), loss)


def head_scale(statistics: HeadStatistics) -> torch.Tensor:
    """Returns divisors of K or V for which one INT8 scale a token and head costs least.

    Args:
        statistics: Of one layer.

    Returns:
        float32 [heads, channels], geometric mean 1 in each head.
    """
    sizes = torch.cat(statistics.kept).float()
    energy = statistics.energy.float().clamp_min(_FLOOR)
    typical = sizes.square().mean(dim=0).sqrt().clamp_min(1e-6)
    scales = [
        _searched(
            0.5 * typical[head].log(),
            _head_loss(sizes[:, head], energy[head]),
        )
        for head in range(sizes.shape[1])
    ]
    return torch.stack(scales)


def _head_loss(sizes: torch.Tensor, energy: torch.Tensor) -> Loss:
    def loss(scale: torch.Tensor) -> torch.Tensor:
        largest = (sizes / scale).amax(dim=1)
        spread = (energy * scale.square()).sum().log()
        return largest.square().mean().log() + spread

    return loss


def _searched(start: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Returns the best scale that Adam meets on its way from exp(start)."""
    best_loss, best = float("inf"), torch.ones_like(start)
    logarithm = (start - start.mean()).detach().requires_grad_()
    optimizer = torch.optim.Adam([logarithm], lr=RATE)
    for step in range(STEPS + 1):
        value = loss(logarithm.exp())
        if float(value.detach()) < best_loss:
            best_loss, best = float(value.detach()), logarithm.detach().clone()
        if step < STEPS:
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    if float(loss(torch.ones_like(start))) <= best_loss:
        return torch.ones_like(start)
    return (best - best.mean()).exp()


def rounding_loss(
    weight: torch.Tensor,
    energy: torch.Tensor,
    spread: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> float:
    """Returns the rise of perplexity in percent that rounding a weight should cost.

    Args:
        weight: float32 [out, in].
        energy: float32 [out], mean square of gradients.
        spread: float32 [in].
        scale: Factors on columns, or None.
    """
    total = 0.0
    for start in range(0, len(weight), _PART):
        rows = weight[start : start + _PART]
        scaled = rows if scale is None else rows * scale
        q, step = quantize_channels(scaled)
        error = q * step[:, None] - scaled
        if scale is not None:
            error = error / scale
        total += float(energy[start : start + _PART] @ error.square() @ spread)
    return 50 * total


def most_sensitive(
    losses: Mapping[str, float], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the layers that a second plane helps most, the costliest first.

    Args:
        losses: Estimated loss of each layer.
        sizes: Parameters of each layer.
    """
    total, parameters = sum(losses.values()), sum(sizes.values())
    chosen: list[str] = []
    taken = 0
    for name in sorted(losses, key=lambda one: losses[one] / sizes[one], reverse=True):
        fits = taken + sizes[name] <= SHARE * parameters
        worth = losses[name] >= WORTH * total
        if fits and worth and len(chosen) + 1 <= max(1, round(SHARE * len(losses))):
            chosen.append(name)
            taken += sizes[name]
    return tuple(sorted(chosen, key=lambda one: losses[one], reverse=True))
