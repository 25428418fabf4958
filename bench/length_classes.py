"""Length classes: groups bound to short or long prompts, against all for all.

    python bench/length_classes.py [--groups 10] [--load 0.7] [--measure] [--report]

Prompts of 20 to 240 tokens and of 2100 to 3500, interactive, by the scheduler's own
policy on simulated groups whose step times were measured with the real engine. Without
binding every group takes every length; with it, as many groups are bound to long
prompts as their part of the work asks for. The same jobs, one after the other. The last
line is JSON: throughput, waits, and how much the load (tokens still to be computed)
varies from group to group: standard deviation over mean, averaged over the run.
"""

import argparse
import statistics

from harness import Figures, finish, machine, percentile, show
from simulate_fits import measured_fits, saved_fits
from simulate_group import Group
from simulate_load import Arrival, group_ms_per_job, two_lengths
from simulate_pool import Lanes, Outcome, Simulation

from tokenmill.scheduler.policy import plan

SHORT_TOKENS = 2048
CLAIMED = {"load_variance_percent": (38, 7), "throughput_gain_percent": 22}
"""What the source material claims for this; printed beside what is measured."""


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--jobs", type=int, default=6_000)
    add("--groups", type=int, default=10)
    add("--load", type=float, default=0.7, help="offered, of what the pool can do")
    add("--long-part", type=float, default=0.1, help="of the jobs")
    add("--seed", type=int, default=1)
    add("--measure", action="store_true", help="measure step times with the engine now")
    add("--model", default="smollm2-135m", help="with --measure")
    add("--report", action="store_true", help="save in bench/results")
    return parser.parse_args()


def long_groups(options: argparse.Namespace, fit: tuple[float, float]) -> int:
    """Returns how many groups the long prompts need, at least one of each kind."""
    sample = two_lengths(5_000, 1.0, options.seed, options.long_part)
    kinds: tuple[list[Arrival], list[Arrival]] = ([], [])
    for arrival in sample:
        kinds[arrival[1].tokens > SHORT_TOKENS].append(arrival)
    short, long = (len(kind) * group_ms_per_job(kind, fit, 12) for kind in kinds)
    wanted = round(options.groups * long / (short + long))
    return min(max(wanted, 1), options.groups - 1)


def run(
    options: argparse.Namespace,
    fit: tuple[float, float],
    bound_to_long: int,
    load: float,
) -> Figures:
    """Runs the workload; a load above 1 shows what the pool can do at most."""
    sample = two_lengths(5_000, 1.0, options.seed, options.long_part)
    per_ms = load * options.groups / group_ms_per_job(sample, fit, 12)
    serves = ["long"] * bound_to_long
    serves += ["short" if bound_to_long else "any"] * (options.groups - bound_to_long)
    groups = [Group(f"w{i:03}", fit, kind) for i, kind in enumerate(serves)]
    side = Simulation(plan, Lanes(), groups, {}, 10.0, SHORT_TOKENS, note_loads=True)
    outcome = side.run(
        two_lengths(options.jobs, per_ms, options.seed, options.long_part)
    )
    return figures(outcome)


def figures(outcome: Outcome) -> Figures:
    """Returns throughput, waits and the variation of load between the groups."""
    kinds: dict[str, list[float]] = {"short": [], "long": []}
    gaps: dict[str, list[float]] = {"short": [], "long": []}
    for run in outcome.ended:
        kind = "long" if run.job.tokens > SHORT_TOKENS else "short"
        kinds[kind].append(run.first_ms - run.job.enqueued_ms)
        gaps[kind].append((run.finished_ms - run.first_ms) / max(run.made, 1))
    # The middle of the run, second by second: how far apart the groups are.
    loads = outcome.loads[len(outcome.loads) // 10 : len(outcome.loads) * 8 // 10]
    apart = [
        statistics.pstdev(second) / statistics.fmean(second)
        for second in loads
        if any(second)
    ]
    return {
        "jobs": len(outcome.ended),
        "jobs_per_s": len(outcome.ended) / outcome.end_ms * 1000,
        "tokens_in_hand": statistics.fmean(map(statistics.fmean, loads)),
        "load_variation_percent": 100 * statistics.fmean(apart),
        **{
            f"{kind}_first_token_p{int(100 * part)}_ms": percentile(times, part)
            for kind, times in kinds.items()
            for part in (0.5, 0.95)
        },
        **{
            f"{kind}_ms_per_token_p95": percentile(times, 0.95)
            for kind, times in gaps.items()
        },
    }


def main() -> int:
    """Runs both sides at the load asked for and beyond what the pool can do."""
    options = parse()
    report: dict[str, object] = {"benchmark": "length_classes", "machine": machine()}
    fits = measured_fits(options.model) if options.measure else saved_fits()
    bound = long_groups(options, fits[0])
    report |= {
        "step_fit_ms": fits[0],
        "groups": options.groups,
        "bound_to_long": bound,
        "load": options.load,
        "long_part": options.long_part,
        "seed": options.seed,
    }
    sides: dict[str, Figures] = {}
    for name, bound_to_long, load in (
        ("unbound", 0, options.load),
        ("bound", bound, options.load),
        ("unbound_full", 0, 1.5),
        ("bound_full", bound, 1.5),
    ):
        sides[name] = found = run(options, fits[0], bound_to_long, load)
        show(name, found)
    gain = sides["bound_full"]["jobs_per_s"] / sides["unbound_full"]["jobs_per_s"] - 1
    report |= {
        **{
            name: {key: round(value, 2) for key, value in found.items()}
            for name, found in sides.items()
        },
        "throughput_gain_percent": round(100 * gain, 1),
        "claimed": CLAIMED,
        "problems": [
            f"{name}: {found['jobs']:.0f} of {options.jobs} jobs ended"
            for name, found in sides.items()
            if found["jobs"] != options.jobs
        ],
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
