"""What bench/queue.py makes of its figures: targets, and valid runs. Pure."""

from collections.abc import Mapping, Sequence

Figures = Mapping[str, object]

TARGETS = {"jobs_per_s": 2000, "p99_ms": 15.0, "ratio": 3.0}
"""The rate of tokenmill, its latency at 50 jobs/s, its rate over each peer's."""


def number_of(found: Figures, name: str) -> float:
    """One of a side's figures."""
    return float(str(found[name]))


def missed(report: Figures) -> list[str]:
    """Targets that were not reached, or not measured."""
    found = []
    rate = number_of(report, "jobs_per_s")
    if rate < TARGETS["jobs_per_s"]:
        found.append(f"jobs_per_s is {rate:.0f}; the target is {TARGETS['jobs_per_s']}")
    if "p99_ms" not in report:
        found.append(f"p99_ms was not measured; the target is {TARGETS['p99_ms']}")
    elif number_of(report, "p99_ms") > TARGETS["p99_ms"]:
        found.append(f"p99_ms is {report['p99_ms']}; the target is {TARGETS['p99_ms']}")
    comparisons = report["comparisons"]
    assert isinstance(comparisons, dict)
    for peer, by in comparisons.items():
        if by["ratio"] < TARGETS["ratio"]:
            found.append(f"{by['ratio']} times {peer}; the target is 3")
    return found


def invalid(report: Figures, sides: Mapping[str, Sequence[Figures]]) -> list[str]:
    """What makes the run no comparison, whether or not targets are asked for."""
    found = []
    for what in ("not_installed", "not_completed"):
        peers = report[what]
        assert isinstance(peers, dict)
        found += [
            f"{peer} was named and did not run ({what.replace('_', ' ')}): {why}"
            for peer, why in peers.items()
        ]
    for name, turns in sides.items():
        wrong = sum(int(number_of(turn, "wrong")) for turn in turns)
        if wrong:
            found.append(f"{name}: {wrong} results differ from what was asked for")
    return found
