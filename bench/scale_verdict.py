"""Whether many waiting jobs change anything: for bench/scale.py, and pure."""

ALIKE = 1.2
"""From the smallest level to the largest nothing may change by more than this."""
MORE_IS_BETTER = ("dispatched_per_s",)
LESS_IS_BETTER = ("scheduler_us_per_job", "plan_us_per_job", "scheduler_rss_mib")


def changed(levels: dict[str, dict[str, object]]) -> tuple[dict[str, float], list[str]]:
    """The largest level over the smallest, and what grew by too much.

    A plan gives out as many jobs as fit, which depends on how fast the worker was, so
    its processor time is counted per job given out.
    """
    first, last = (levels[k] for k in (min(levels, key=int), max(levels, key=int)))
    ratios: dict[str, float] = {}
    problems: list[str] = []
    for name in (*MORE_IS_BETTER, *LESS_IS_BETTER):
        if name not in first or name not in last:
            problems.append(f"{name} was not measured")
            continue
        small, large = float(str(first[name])), float(str(last[name]))
        ratios[name] = round(large / small if small else 1.0, 3)
        worse = ratios[name]
        if name in MORE_IS_BETTER:
            worse = 1 / max(worse, 1e-9)
        if worse > ALIKE:
            problems.append(f"{name}: {small} at the smallest level, {large} at most")
    return ratios, problems
