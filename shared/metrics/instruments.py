"""Counters, gauges and histograms of this process, without any library.

They stand in the hot paths of scheduler and worker, and in code that a producer loads
too, so they are a dictionary and an addition each (docs/adr/0022-metrics.md). Each is
changed by one thread; a scrape on another reads copies.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

Labels = tuple[str, ...]
MOST_SERIES: Final = 512
"""Label sets of one instrument; what comes beyond counts under `OTHER`."""
OTHER: Final = "other"


class Instrument:
    """What all have in common.

    Args:
        name: Without `_total`, in base units.
        help_text: One sentence for whoever reads the scrape.
        labels: Names of its labels.
        kinds: Kinds of processes that show it, even while it counts nothing.
    """

    kind = "untyped"

    def __init__(
        self, name: str, help_text: str, *labels: str, kinds: tuple[str, ...]
    ) -> None:
        self.name = name
        self.help_text = help_text
        self.labels = labels
        self.kinds = kinds

    def _other(self, labels: Labels) -> Labels:
        if len(labels) != len(self.labels):
            raise ValueError(
                f"{self.name} has the labels {self.labels}, got {len(labels)} values"
            )
        return (OTHER,) * len(labels)


class Counter(Instrument):
    """Only ever rises."""

    kind = "counter"

    def __init__(
        self, name: str, help_text: str, *labels: str, kinds: tuple[str, ...]
    ) -> None:
        super().__init__(name, help_text, *labels, kinds=kinds)
        # A counter that first shows at 1 has no rise until it is 2.
        starts = self.kind == "counter" and not labels
        self.values: dict[Labels, float] = {(): 0.0} if starts else {}

    def add(self, *labels: str, by: float = 1) -> None:
        """Adds to the series with these label values, in order."""
        try:
            self.values[labels] += by
        except KeyError:
            if len(self.values) >= MOST_SERIES or len(labels) != len(self.labels):
                labels = self._other(labels)
            self.values[labels] = self.values.get(labels, 0) + by


class Gauge(Counter):
    """A value that is set, or that rises and falls."""

    kind = "gauge"

    def set(self, *labels: str, to: float) -> None:
        """Sets the series with these label values."""
        if labels not in self.values:
            self.add(*labels, by=0)
        if labels in self.values:
            self.values[labels] = to

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Sets all series at once; those that are not in `values` are gone."""
        self.values = dict(list(values.items())[:MOST_SERIES])


class Series:
    """One label set of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value in its bucket, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Histogram(Instrument):
    """How values are distributed over buckets.

    Args:
        name: In base units.
        help_text: One sentence.
        *labels: Names of its labels.
        bounds: Upper bounds of the buckets, rising.
        kinds: As for `Instrument`.
    """

    kind = "histogram"

    def __init__(
        self,
        name: str,
        help_text: str,
        *labels: str,
        bounds: tuple[float, ...],
        kinds: tuple[str, ...],
    ) -> None:
        super().__init__(name, help_text, *labels, kinds=kinds)
        self.bounds = bounds
        self.series: dict[Labels, Series] = {}

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Counts a value in its bucket.

        Args:
            value: In base units.
            *labels: Label values, in order.
            times: How often it occurred.
        """
        (self.series.get(labels) or self.of(*labels)).observe(value, times)

    def of(self, *labels: str) -> Series:
        """Returns the series with these label values, which a hot path may keep."""
        one = self.series.get(labels)
        if one is None:
            if len(self.series) >= MOST_SERIES or len(labels) != len(self.labels):
                labels = self._other(labels)
            one = self.series.setdefault(labels, Series(self.bounds))
        return one
