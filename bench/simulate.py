"""The scheduler's policy against a thousand simulated groups and a million jobs.

    python bench/simulate.py [--jobs 1000000] [--groups 1000] [--measure] [--report]

Drives `scheduler/policy.py` and the waiting room as the scheduler does. A group's step
of n tokens takes a + b n ms, as measured with the real engine: from bench/results, or
now with --measure. Several tenants, two classes, bursts above what the pool can do.
The baseline gets the same jobs in one line, first in, first out, to the least loaded
group. Times of the policy and of the run are processor time, so that other work on the
machine does not count. The last line is JSON.
"""

import argparse
import gc
import sys
import time
from collections.abc import Mapping

from harness import finish, machine, percentile, show
from simulate_fifo import fifo
from simulate_fits import Fits, measured_fits, saved_fits
from simulate_group import Group
from simulate_load import TENANTS, group_ms_per_job, mixed
from simulate_pool import Lanes, OneLine, Outcome, Policy, Simulation

from tokenmill.scheduler.policy import plan
from tokenmill.shared.messages import JobClass

WEIGHTS = {name: weight for name, (_, weight) in TENANTS.items()}
WINDOW_MS = 5_000.0
"""Shares of tenants are compared over windows of this length in which jobs wait."""
TARGET_S = 300.0


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--jobs", type=int, default=1_000_000)
    add("--groups", type=int, default=1_000)
    add("--load", type=float, default=0.85, help="mean load of the pool")
    add("--seed", type=int, default=1)
    add("--plan-ms", type=float, default=25.0, help="shortest time between plans")
    add("--baseline-jobs", type=int, default=200_000, help="of them at most, for FIFO")
    add("--measure", action="store_true", help="measure step times with the engine now")
    add("--model", default="smollm2-135m", help="with --measure")
    add("--report", action="store_true", help="save in bench/results")
    return parser.parse_args()


def simulate(
    policy: Policy,
    queue: Lanes | OneLine,
    options: argparse.Namespace,
    fits: Fits,
    jobs: int,
) -> tuple[Outcome, float]:
    """Runs one side; returns what it saw and the processor seconds it took."""
    groups = [Group(f"w{i:04}", fits[i % len(fits)]) for i in range(options.groups)]
    sample = list(mixed(20_000, 1.0, options.seed))
    job_ms = sum(group_ms_per_job(sample, fit, 14) for fit in fits) / len(fits)
    per_ms = options.load * options.groups / job_ms
    side = Simulation(policy, queue, groups, WEIGHTS, options.plan_ms)
    began = time.process_time()
    outcome = side.run(mixed(jobs, per_ms, options.seed))
    return outcome, time.process_time() - began


def waits(outcome: Outcome, name: str, **wanted: object) -> dict[str, float]:
    """Milliseconds from arrival to the first token, of some of the jobs."""
    times = [
        run.first_ms - run.job.enqueued_ms
        for run in outcome.ended
        if all(getattr(run.job, key) == value for key, value in wanted.items())
    ]
    return {
        f"{name}_p{int(part * 100)}_ms": round(percentile(times, part), 1)
        for part in (0.5, 0.95, 0.99)
    }


def max_min(capacity: float, asked: Mapping[str, float]) -> dict[str, float]:
    """Returns the weighted max-min fair shares of a capacity."""
    left, shares = dict(asked), dict.fromkeys(asked, 0.0)
    while left and capacity > 1e-6:
        unit = capacity / sum(WEIGHTS[name] for name in left)
        full = [n for n in left if left[n] - shares[n] <= unit * WEIGHTS[n]]
        for name in full or list(left):
            step = left[name] - shares[name] if full else unit * WEIGHTS[name]
            shares[name] += step
            capacity -= step
            if full:
                del left[name]
        if not full:
            break
    return shares


def fairness(outcome: Outcome, job_class: JobClass) -> float:
    """Jain's index of tokens given over the weighted max-min fair share.

    Over windows at whose end jobs of the class wait; 1 is fair, 1/tenants is one tenant
    alone; 1 as well where none ever waited.
    """
    windows: dict[int, list[dict[str, float]]] = {}
    for place, events in enumerate((outcome.arrived, outcome.dispatched)):
        for at, kind, tenant, tokens in events:
            if kind is job_class:
                pair = windows.setdefault(int(at // WINDOW_MS), [{}, {}])
                pair[place][tenant] = pair[place].get(tenant, 0.0) + tokens
    backlog = dict.fromkeys(WEIGHTS, 0.0)
    found: list[float] = []
    for _, (arrived, given) in sorted(windows.items()):
        asked = {n: backlog[n] + arrived.get(n, 0.0) for n in WEIGHTS}
        capacity = sum(given.values())
        backlog = {n: asked[n] - given.get(n, 0.0) for n in WEIGHTS}
        if capacity <= 0 or sum(backlog.values()) < 0.05 * capacity:
            continue
        fair = max_min(capacity, {n: a for n, a in asked.items() if a > 0})
        parts = [given.get(n, 0.0) / share for n, share in fair.items() if share > 0]
        found.append(sum(parts) ** 2 / (len(parts) * sum(p * p for p in parts)))
    return sum(found) / len(found) if found else 1.0


def figures(outcome: Outcome, seconds: float) -> dict[str, float]:
    """Returns one side's figures."""
    made = sum(run.made for run in outcome.ended)
    jobs, plans = len(outcome.ended), outcome.plan_s
    return {
        "jobs": jobs,
        "simulated_s": round(outcome.end_ms / 1000, 1),
        "cpu_s": round(seconds, 1),
        "jobs_per_s": round(jobs / outcome.end_ms * 1000, 1),
        "output_tokens_per_s": round(made / outcome.end_ms * 1000),
        **waits(outcome, "interactive", job_class=JobClass.INTERACTIVE),
        **waits(outcome, "bulk", job_class=JobClass.BULK),
        **waits(outcome, "rare_tenant", tenant="rare", job_class=JobClass.INTERACTIVE),
        "jain_interactive": round(fairness(outcome, JobClass.INTERACTIVE), 4),
        "jain_bulk": round(fairness(outcome, JobClass.BULK), 4),
        "preemptions": outcome.preemptions,
        "plans": len(plans),
        "plan_mean_ms": round(1000 * sum(plans) / len(plans), 3),
        "plan_p99_ms": round(1000 * percentile(plans, 0.99), 3),
        "plan_max_ms": round(1000 * max(plans), 3),
        "policy_us_per_job": round(1e6 * sum(plans) / jobs, 2),
        "jobs_seen_per_plan": round(sum(outcome.looked_at) / len(plans), 1),
    }


def main() -> int:
    """Runs both sides, prints their figures, and the JSON line last."""
    options = parse()
    report: dict[str, object] = {"benchmark": "simulate", "machine": machine()}
    fits = measured_fits(options.model) if options.measure else saved_fits()
    report |= {
        "step_fits_ms": fits,
        "fits_from": "measured now" if options.measure else "bench/results/engine.json",
        "groups": options.groups,
        "load": options.load,
        "seed": options.seed,
    }
    gc.freeze()
    problems: list[str] = []
    fewer = min(options.jobs, options.baseline_jobs)
    for name, policy, queue, jobs in (
        ("policy", plan, Lanes(), options.jobs),
        ("fifo", fifo, OneLine(), fewer),
    ):
        outcome, seconds = simulate(policy, queue, options, fits, jobs)
        report[name] = found = figures(outcome, seconds)
        show(name, found)
        sys.stdout.flush()
        if found["jobs"] != jobs:
            problems.append(f"{name}: {found['jobs']} of {jobs} jobs ended")
        if name == "policy" and seconds > TARGET_S:
            problems.append(f"{seconds:.0f} s of processor; target {TARGET_S:.0f} s")
        del outcome
        gc.collect()
    report["problems"] = problems
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
