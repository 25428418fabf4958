"""What switches between versions did to the jobs: for bench/switches.py, and pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from harness import Figures
from model_load import Window, doubts

from tokenmill.producer.info import JobInfo

TARGET = 1.5
"""P99 of the whole time with switches over that without, at most."""
VERSIONS = ("v1", "v2")
KINDS = ("one version", "both", "switching")
FEWEST_SWITCHES = 5
"""In a window; below, not every kind of move was seen."""


def served(windows: Sequence[Window]) -> dict[str, int]:
    """Returns how many jobs each version says that it served."""
    found = Counter(one.version or "none" for w in windows for one in w.done)
    return dict(sorted(found.items()))


def wrongly_served(windows: Mapping[str, Sequence[Window]]) -> list[str]:
    """What is wrong about who served.

    Args:
        windows: By situation, in the order of the rounds.
    """
    problems: list[str] = []
    for kind, found in windows.items():
        for number, window in enumerate(found):
            allowed = set(VERSIONS)
            if kind == "one version":
                allowed = {VERSIONS[number % 2]}
            others = {str(one.version) for one in window.done} - allowed
            if others:
                names = ", ".join(sorted(others))
                problems.append(f"{kind}, round {number + 1}: jobs served by {names}")
    problems += [
        f"{kind}: {version} served no job"
        for kind in ("both", "switching")
        for version in VERSIONS
        if version not in served(windows[kind])
    ]
    return problems


def lost(num_sent: int, infos: Sequence[JobInfo], num_dead: int) -> list[str]:
    """What is wrong about the jobs' records.

    Args:
        num_sent: Requests.
        infos: A record of each job that was taken.
        num_dead: Dead letters at the end.
    """
    problems = [
        f"job {info.id}: {info.state} after {info.attempts} failed attempts and "
        f"{info.lease_losses} lost leases"
        for info in infos
        if info.state != "succeeded" or info.attempts or info.lease_losses
    ]
    if len({info.id for info in infos}) != num_sent:
        problems.append(f"{num_sent} requests were sent and {len(infos)} jobs taken")
    if num_dead:
        problems.append(f"{num_dead} dead letters")
    return problems


def verdict_of(
    steps: Mapping[str, Figures],
    load: float,
    num_switches: Sequence[int],
    wrong: Sequence[str],
) -> tuple[str, list[str]]:
    """Whether the target is met, missed or cannot be judged, and what is wrong.

    Args:
        steps: Figures of each situation.
        load: That was wanted, as a part of what one version can do.
        num_switches: In each window with switches.
        wrong: About the jobs.
    """
    unsure = doubts(steps, load)
    if min(num_switches) < FEWEST_SWITCHES:
        unsure.append(
            f"{min(num_switches)} switches in a window, {FEWEST_SWITCHES} at least "
            "were to be: make --requests more or --every shorter"
        )
    ratio = ratios(steps)["p99"]
    slow = f"P99 with switches is {ratio:.2f} times that without; at most {TARGET:g}"
    late = [f"{slow} were to be"] if ratio > TARGET else []
    problems = [*wrong, *unsure, *late]
    if wrong or late:
        return "missed", problems
    return ("not judged" if unsure else "met"), problems


def ratios(steps: Mapping[str, Figures]) -> Figures:
    """Returns the whole time with switches over that on one version, and on both."""
    moved = steps["switching"]
    return {
        f"{part}{suffix}": round(
            moved[f"total_ms_{part}"] / steps[kind][f"total_ms_{part}"], 3
        )
        for kind, suffix in (("one version", ""), ("both", "_to_both"))
        for part in ("p50", "p95", "p99")
    }
