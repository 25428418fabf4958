"""Whether samples grow, and whether the load was there: for bench/soak.py. Pure."""

from statistics import median

GROWTH_PERCENT = 5.0
"""Growth after the warm-up above which memory is not flat."""
LEAST_SAMPLES = 6
LEAST_LOAD = 0.95
"""Part of the load aimed at that must really have been there."""


def growth_percent(values: list[float]) -> float:
    """Returns by how much the last third of a series is above its first.

    Medians of thirds, so that neither a peak nor the moment of one sample decides: what
    goes up and down is flat, what goes up steadily is not.

    Args:
        values: Samples at equal distances, the warm-up left out.

    Raises:
        SystemExit: There are too few to say anything.
    """
    if len(values) < LEAST_SAMPLES:
        raise SystemExit(
            f"{len(values)} samples after the warm-up say nothing about growth; run "
            "longer, or sample more often"
        )
    third = len(values) // 3
    first, last = median(values[:third]), median(values[-third:])
    return 0.0 if first == 0 else (last / first - 1) * 100


def load_problems(not_sent: float, per_s: float, wanted_per_s: float) -> list[str]:
    """Says where the load was not what it was to be: flat memory then proves little.

    Args:
        not_sent: Jobs that a client left out because too many were in flight.
        per_s: Jobs that ended, each second.
        wanted_per_s: What was aimed at.
    """
    problems = []
    if not_sent:
        problems.append(f"{not_sent:.0f} jobs were not sent: the pool fell behind")
    if per_s < LEAST_LOAD * wanted_per_s:
        problems.append(
            f"{per_s:.0f} jobs/s ended of {wanted_per_s:.0f} aimed at: not the load "
            "that was asked for"
        )
    return problems
