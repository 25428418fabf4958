"""Whether a series of samples grows: for bench/soak.py, and pure."""

from statistics import median

GROWTH_PERCENT = 5.0
"""Growth after the warm-up above which memory is not flat."""
LEAST_SAMPLES = 6


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
