"""Whether many waiting jobs change anything: for bench/scale.py, and pure."""

ALIKE = 1.2
"""From the smallest level to the largest nothing may change by more than this."""
ALIKE_BY_CLOCK = 1.5
"""The same of a median by the clock, which other processes lengthen too."""
MORE_IS_BETTER = ("dispatched_per_s",)
LESS_IS_BETTER = (
    *("scheduler_us_per_job", "redis_us_per_job", "plan_us_per_job"),
    *("step_p50_ms", "read_p50_ms", "scheduler_rss_mib"),
)
FILL_RATES = ("enqueue_first_per_s", "enqueue_last_per_s")
"""Compared within the largest level: a fill of a few jobs is over before it is warm."""

Level = dict[str, object]


def changed(levels: dict[str, Level]) -> tuple[dict[str, float], list[str]]:
    """The largest level over the smallest, and what grew by too much.

    A plan gives out as many jobs as fit, which depends on how fast the worker was, so
    its processor time is counted per job given out.
    """
    first, last = (levels[k] for k in (min(levels, key=int), max(levels, key=int)))
    found = Comparison()
    for name in MORE_IS_BETTER:
        found.add(name, first, last, name, name, more_is_better=True)
    for name in LESS_IS_BETTER:
        found.add(name, first, last, name, name, more_is_better=False)
    found.add("enqueue_per_s", last, last, *FILL_RATES, more_is_better=True)
    return found.ratios, found.problems


class Comparison:
    """Ratios of figures, and those that are too far from 1."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}
        self.problems: list[str] = []

    def add(
        self,
        name: str,
        first: Level,
        last: Level,
        first_name: str,
        last_name: str,
        *,
        more_is_better: bool,
    ) -> None:
        """Compares a figure of few waiting jobs with one of many."""
        try:
            small, large = float(str(first[first_name])), float(str(last[last_name]))
        except KeyError:
            self.problems.append(f"{name} was not measured")
            return
        if small <= 0 or large <= 0:
            self.problems.append(f"{name}: {small} and {large}; nothing was measured")
            return
        self.ratios[name] = round(large / small, 3)
        worse = small / large if more_is_better else large / small
        if worse > (ALIKE_BY_CLOCK if name.endswith("_p50_ms") else ALIKE):
            self.problems.append(f"{name}: {small} with few waiting, {large} with most")
