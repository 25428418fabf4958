"""How long a step takes: a + b * tokens, fitted while running."""

from typing import Final

FORGET: Final = 0.98
"""Weight of a step relative to the next one: about the last 50 steps count."""
MAX_RATIO: Final = 3.0
"""A step slower than this many times the fit is counted as that slow: one stall (a
page fault, a noisy neighbour) must not move the fit."""
WARM_STEPS: Final = 8
"""Steps before outliers can be told."""


class StepTimeFit:
    """Least squares over recent steps, with older ones forgotten."""

    __slots__ = ("_count", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._count = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def count(self) -> int:
        """Steps observed."""
        return self._count

    def predict(self, num_tokens: float) -> float:
        """Returns the milliseconds that a step of this size is expected to take."""
        base, slope = self.coefficients
        return base + slope * num_tokens

    def observe(self, num_tokens: float, milliseconds: float) -> None:
        """Takes one step's size and duration."""
        self._count += 1
        if self._count > WARM_STEPS:
            limit = MAX_RATIO * self.predict(num_tokens)
            milliseconds = min(milliseconds, limit) if limit > 0 else milliseconds
        elif self._outdated_by(num_tokens, milliseconds):
            self._n = self._x = self._y = self._xx = self._xy = 0.0
        keep = FORGET
        self._n = self._n * keep + 1.0
        self._x = self._x * keep + num_tokens
        self._y = self._y * keep + milliseconds
        self._xx = self._xx * keep + num_tokens * num_tokens
        self._xy = self._xy * keep + num_tokens * milliseconds

    def _outdated_by(self, num_tokens: float, milliseconds: float) -> bool:
        """Whether a step shows that those before it were stalls, as the first ones of a
        process are (compilation, cold memory): no smaller, and far faster.
        """
        is_large = num_tokens * self._n >= self._x
        return is_large and MAX_RATIO * milliseconds < self.predict(num_tokens)

    @property
    def coefficients(self) -> tuple[float, float]:
        """(a, b) in milliseconds and milliseconds per token, neither negative."""
        if self._n == 0.0:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread < 1e-9 * max(1.0, mean_x * mean_x):
            return mean_y, 0.0
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        if slope <= 0.0:
            return mean_y, 0.0
        base = mean_y - slope * mean_x
        return (base, slope) if base >= 0.0 else (0.0, self._xy / self._xx)
