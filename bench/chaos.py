"""Kills, stops and cuts everything while thousands of streams run; loses nothing.

    python bench/chaos.py [--minutes 5] [--seed 1] [--jobs 2000] [--workers 2]
                          [--engine model|echo:5] [--every 4.5] [--faults a,b]
                          [--patience 600] [--keep DIRECTORY]

Redis with `appendfsync always`, workers, a scheduler and its standby, producers,
subscribers and a canceller are a process each; half of them reach Redis through a
proxy that breaks. At the end every job is compared with what its subscribers saw and
with an undisturbed run. The last line is one JSON object; the exit code is 1 when
anything was lost, repeated, left over or different.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chaos_model
from chaos_check import Checker
from chaos_faults import Injector
from chaos_ledger import Ledger, figures
from chaos_plan import VARIANTS, make_faults, make_job, make_request
from chaos_run import Options, Pool
from chaos_truth import KEYS, books, connect, leaked_keys, read_truth
from harness import machine

from tokenmill import Client, Prompt, Sampling

TICK_S = 0.05
CALM_TRIES = 3
SETTLE_S = 60.0
"""Time for the last books to close once every job has ended."""


async def calm(url: str, model: str, variants: Sequence[int]) -> list[str]:
    """Runs variants once while nothing is hurt; returns the jobs' ids."""
    prompts = []
    for variant in variants:
        text, options = make_request(variant)
        prompts.append(Prompt(text, model=model, sampling=Sampling(**options)))
    async with Client(url) as mill:
        jobs = await mill.submit_many(prompts, when_unserved="wait")
        for job in jobs:
            await job.result(timeout=120)
    return [job.id for job in jobs]


def read_reference(pool: Pool) -> tuple[dict[int, dict[str, Any]], set[str]]:
    """Results of undisturbed runs, by variant, and the ids of those jobs.

    On a busy machine a lease may end though nobody hurts it; such a job runs again.
    """
    reference: dict[int, dict[str, Any]] = {}
    every: set[str] = set()
    for _ in range(CALM_TRIES):
        left = [variant for variant in range(VARIANTS) if variant not in reference]
        ids = asyncio.run(calm(pool.url, chaos_model.MODEL, left))
        every.update(ids)
        with connect(pool.port) as client:
            for variant, job_id in zip(left, ids, strict=True):
                if client.hget(KEYS.job(job_id), "epoch") == "2":  # dispatched, ended
                    output = str(client.get(KEYS.output(job_id)))
                    reference[variant] = json.loads(output)
        if len(reference) == VARIANTS:
            return reference, every
    raise SystemExit(f"the reference was disturbed {CALM_TRIES} times")


def run_faults(pool: Pool, options: Options, ledger: Ledger) -> None:
    """Hurts the pool by plan; returns when the last fault is over."""
    plan = make_faults(
        options.seed, options.seconds, options.every_s, options.lease_s, options.kinds
    )
    injector, began = Injector(pool, ledger), time.monotonic()
    while time.monotonic() - began < options.seconds or plan:
        while plan and plan[0].at_s <= time.monotonic() - began:
            injector.apply(plan.pop(0))
        pool.tick()
        time.sleep(TICK_S)


def wait_for_the_end(pool: Pool, patience_s: float) -> list[str]:
    """Waits until every client has finished and the books are closed."""
    end = time.monotonic() + patience_s
    while not pool.clients_finished:
        if time.monotonic() > end:
            names = [part.name for part in pool.clients if not part.finished]
            return [f"{', '.join(names)} had not finished after {patience_s:.0f} s"]
        pool.tick()
        time.sleep(TICK_S)
    pool.heal()
    wrong: list[str] = []
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        pool.tick()
        with connect(pool.port) as client:
            wrong = books(client)
        if not wrong:
            break
        time.sleep(0.25)
    return wrong


def run(options: Options, directory: Path) -> dict[str, Any]:
    """One whole run.

    Args:
        options: What to do.
        directory: Empty; gets data, logs and journals.

    Returns:
        The ledger, with `problems`: every breach.
    """
    ledger, problems = Ledger(), []
    began = time.monotonic()
    with Pool(options, directory) as pool:
        reference, calm_ids = read_reference(pool)
        print(f"reference: {len(reference)} requests, undisturbed", flush=True)
        pool.start_clients()
        run_faults(pool, options, ledger)
        print(f"{len(ledger.blows)} faults done; waiting for the end", flush=True)
        problems += wait_for_the_end(pool, options.patience_s)
        with connect(pool.port) as client:
            truth = read_truth(client, directory)
            leaks = leaked_keys(client)
        problems += [f"{key} would stay in Redis for ever" for key in leaks]
        problems += pool.surprises()
        for job_id in calm_ids:
            truth.jobs.pop(job_id)
    problems += pool.left_over()
    if not ledger.blows:
        skipped = dict(ledger.skipped)
        problems.append(f"no fault was done, so nothing is proved; skipped: {skipped}")
    checker = Checker(truth, options.seed, options.jobs, reference)
    checker.run()
    jobs = [make_job(options.seed, number) for number in range(options.jobs)]
    return {
        "benchmark": "chaos",
        "seed": options.seed,
        "minutes": round(options.seconds / 60, 2),
        "seconds_in_all": round(time.monotonic() - began, 1),
        "jobs": options.jobs,
        "to_be_cancelled": sum(job.cancel_s is not None for job in jobs),
        "with_deadline": sum(job.deadline_s is not None for job in jobs),
        **figures(ledger, truth, checker.states, directory),
        "problems": problems + checker.breaches,
    }


def show(report: dict[str, Any]) -> None:
    """Prints the ledger for people."""
    for name, value in report.items():
        if isinstance(value, dict):
            print(name)
            for key, one in value.items():
                text = one
                if isinstance(one, dict):
                    text = ", ".join(f"{k} {v}" for k, v in one.items())
                print(f"  {key:<22}{text}")
        elif name != "problems":
            print(f"{name:<28}{value}")


def parse() -> tuple[Options, Path | None]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="model", help="model, echo or echo:<ms>")
    parser.add_argument("--every", type=float, default=4.5, help="seconds a fault")
    parser.add_argument(
        "--patience",
        type=float,
        default=Options.patience_s,
        help="seconds until all must have ended",
    )
    parser.add_argument("--faults", default="", help="a,b,…: the kinds of one deck")
    parser.add_argument("--keep", type=Path, help="keep data and logs there")
    given = parser.parse_args()
    options = Options(
        seconds=given.minutes * 60,
        seed=given.seed,
        jobs=given.jobs,
        workers=given.workers,
        engine=given.engine,
        every_s=given.every,
        patience_s=given.patience,
        kinds=tuple(kind for kind in given.faults.split(",") if kind),
    )
    return options, given.keep


def main() -> int:
    """Runs it and prints the ledger; the exit status."""
    options, keep = parse()
    surroundings = machine()
    directory = keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    report = run(options, directory) | {"machine": surroundings}
    show(report)
    if keep is None and not report["problems"]:
        shutil.rmtree(directory, ignore_errors=True)
    elif report["problems"]:
        print(f"logs and journals are in {directory}", file=sys.stderr)
    for problem in report["problems"]:
        print(f"breach: {problem}", file=sys.stderr)
    print(json.dumps(report), flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
