"""Turns what was counted into Prometheus' families. Needs prometheus-client."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..process_card import ProcessCard
from .catalog import shown_by
from .instruments import Counter, Histogram, Instrument

Refresh = Callable[[], None]
"""Brings gauges up to date before a scrape; called on the thread that serves it."""


class ToldCollector(Collector):
    """Hands out the instruments of one kind of process.

    Args:
        card: Of the process.
        refresh: What has to be asked for at each scrape.
    """

    def __init__(self, card: ProcessCard, refresh: Sequence[Refresh]) -> None:
        self._card = card
        self._refresh = refresh
        self._shown = shown_by(card.kind)

    def collect(self) -> Iterable[Metric]:
        """Returns every family, those without a series too."""
        for refresh in self._refresh:
            refresh()
        yield self._build_info()
        for instrument in self._shown:
            yield family_of(instrument)

    def _build_info(self) -> Metric:
        family = GaugeMetricFamily(
            "tokenmill_build_info",
            "Constant 1; what runs here.",
            labels=("version", "kind"),
        )
        family.add_metric((self._card.version, self._card.kind), 1)
        return family


def family_of(instrument: Instrument) -> Metric:
    """Returns one instrument with all its series."""
    if isinstance(instrument, Histogram):
        return _histogram(instrument)
    assert isinstance(instrument, Counter)
    make = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
    family = make(instrument.name, instrument.help_text, labels=instrument.labels)
    # A copy: another thread may add a series meanwhile.
    for labels, value in instrument.values.copy().items():
        family.add_metric(labels, value)
    return family


def _histogram(instrument: Histogram) -> Metric:
    family = HistogramMetricFamily(
        instrument.name, instrument.help_text, labels=instrument.labels
    )
    for labels, series in instrument.series.copy().items():
        buckets = zip(
            _bounds(instrument), accumulate(series.counts.copy()), strict=True
        )
        family.add_metric(labels, list(buckets), sum_value=series.total)
    return family


def _bounds(instrument: Histogram) -> Iterator[str]:
    for bound in instrument.bounds:
        yield str(float(bound))
    yield "+Inf"


def make_registry(card: ProcessCard, refresh: Sequence[Refresh]) -> CollectorRegistry:
    """Returns everything that one process shows.

    With it what the library knows of any process: memory, CPU time, open files.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ToldCollector(card, refresh))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
