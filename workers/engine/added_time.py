"""What prompt tokens add to a step that decodes: fixed + tokens + keys attended to."""

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW: Final = 64
"""Steps that count."""
SCATTER: Final = 0.1
"""Part of a step's time by which steps of one kind differ anyway."""
ROUNDS: Final = 3
"""Times the weights follow the residuals anew."""
RIDGE: Final = (1e-5, 1e-4, 1e-4)
"""What steps leave open (all of one size, say) goes to the tokens rather than to the
keys or the fixed part."""


class AddedTimeFit:
    """Least squares over the last steps, weighted by Cauchy's function of the residuals
    (iteratively reweighted): a step far off the others, as one that compiled, counts
    next to nothing, also where it was the first.
    """

    def __init__(self) -> None:
        self._steps = np.empty((WINDOW, 4))
        """Of each step: tokens, keys, 1, and the milliseconds added."""
        self._expected = np.empty(WINDOW)
        self._count = 0
        self._found = (0.0, 0.0, 0.0)

    @property
    def largest(self) -> float:
        """Most prompt tokens in one of the steps that count; 0 without any."""
        return float(self._steps[: self._count, 0].max(initial=0.0))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Milliseconds a step, a token, and a key of a token; none negative."""
        per_token, per_key, fixed = self._found
        return fixed, per_token, per_key

    def observe(
        self, tokens: int, keys: float, added_ms: float, expected_ms: float
    ) -> None:
        """Takes one step.

        Args:
            tokens: Prompt tokens in it.
            keys: Keys that these attend to, all together.
            added_ms: What it took beyond `expected_ms`.
            expected_ms: What its decode rows take by themselves.
        """
        at = self._count % WINDOW
        self._steps[at] = tokens, keys, 1.0, added_ms
        self._expected[at] = expected_ms
        self._count += 1
        steps, expected = self._steps[: self._count], self._expected[: self._count]
        sizes, added = steps[:, :3], steps[:, 3]
        # The fast steps first, so that a stall weighs nothing whatever its size. Then
        # larger steps, which scatter more, count less.
        weights = (expected + added + 1e-9) ** -4.0
        for _ in range(ROUNDS):
            self._found = _solve(steps, weights)
            modelled = sizes @ np.array(self._found)
            off = (added - modelled) / (SCATTER * (expected + modelled) + 1e-9)
            weights = 1.0 / (steps[:, 0] * (1.0 + off * off))


def _solve(
    steps: "NDArray[np.float64]", weights: "NDArray[np.float64]"
) -> tuple[float, float, float]:
    """Returns weighted least squares without negative coefficients.

    Args:
        steps: [steps, 4] float64: tokens, keys, 1, milliseconds.
        weights: [steps] float64.
    """
    moments = ((steps.T * weights) @ steps).tolist()
    scale = [math.sqrt(moments[i][i]) + 1e-30 for i in range(3)]
    rows = [
        [
            moments[i][j] / (scale[i] * scale[j]) + (RIDGE[i] if i == j else 0.0)
            for j in range(3)
        ]
        + [moments[i][3] / scale[i]]
        for i in range(3)
    ]
    kept = [0, 1, 2]
    while kept:
        found = _eliminate([[rows[i][j] for j in (*kept, 3)] for i in kept])
        least = min(found)
        if least >= 0.0:
            by_column = dict(zip(kept, found, strict=True))
            tokens, keys, fixed = (by_column.get(i, 0.0) / scale[i] for i in range(3))
            return tokens, keys, fixed
        del kept[found.index(least)]
    return 0.0, 0.0, 0.0


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solves a small positive definite system, given with its right side, in place."""
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
