"""Two models side by side in one pool, against each alone there.

    python bench/mixed_models.py [--model smollm2-135m] [--share 0.5] [--load 0.6]
                                 [--duration 60] [--rounds 2] [--report]

Both are the same checkpoint under two names, with a share of the host each
(`models.share`; 0 lets both use every core). First a closed loop finds what one of
them can do while the other idles. Then an open loop (Poisson) puts that times `--load`
on the first alone, on the second alone, and on both at once, with the same requests at
the same moments; rounds take turns, so that a drift of the machine favours nobody. What
a model feels of its neighbour is the difference of P99: of the wait in the queue, which
has a target (50 ms), of the first token, and of the whole time. Throughput: both in a
closed loop at once, against one alone, and against one model that has the whole host.

The last line is one JSON object with every figure. In seconds:
`python bench/mixed_models.py --engine echo:5 --duration 3 --rounds 1`.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import Figures, finish, machine, quiet_logs, show
from load_plan import WORKLOAD, Request, Step, read_workload
from mixed_load import joined, measured, running

TARGET_MS = 50.0
"""Added wait in the queue at P99, at most."""
LATE_MS = 50.0
"""When P99 of sending is later than this the generator itself was too slow."""
NAMES = ("model-1", "model-2")
Runs = dict[str, list[Figures]]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="built-in name, directory or hub id")
    add("--engine", default="model", help="model, or echo:<ms a step>")
    add("--share", type=float, default=0.5, help="of each; 0: none is set")
    add("--load", type=float, default=0.6, help="part of what one can do")
    add("--users", type=int, default=16, help="of the closed loop")
    add("--max-running", type=int, default=8, help="worker.max_running")
    add("--duration", type=float, default=60.0, help="seconds of each step")
    add("--rounds", type=int, default=2)
    add("--limit-tokens", type=int, help="most output tokens of a request")
    add("--workload", type=Path, default=WORKLOAD, help="JSONL: prompt, max_tokens")
    add("--seed", type=int, default=1)
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser.parse_args(words)


def tables(
    options: argparse.Namespace, names: Sequence[str]
) -> list[dict[str, object]]:
    """The settings of the models; one alone has the whole host."""
    path = options.model
    if options.engine == "model":
        from tokenmill.workers.engine.model.resolve import resolve_model

        # Once, here: two workers would convert the same files at the same time.
        path = str(resolve_model(options.model))
    share = {"share": options.share} if options.share and len(names) > 1 else {}
    return [{"name": name, "path": path, **share} for name in names]


def measure(options: argparse.Namespace) -> tuple[Runs, Figures]:
    """Runs everything; figures of each step by its name, and the rates."""
    requests = read_workload(options.workload, options.limit_tokens)
    runs: Runs = {}
    with tempfile.TemporaryDirectory(prefix="mixed-") as directory:
        one, two = Path(directory) / "1", Path(directory) / "2"
        one.mkdir()
        two.mkdir()
        common = (options.engine, options.max_running)
        with running(one, tables(options, NAMES[:1]), *common) as url:
            _closed(options, url, NAMES[:1], requests, "whole host", runs)
        with running(two, tables(options, NAMES), *common) as url:
            _closed(options, url, NAMES[:1], requests, "alone, full", runs)
            capacity = runs["alone, full model-1"][0]["qps"]
            rate = round(options.load * capacity, 3)
            for number in range(options.rounds):
                for names in ((NAMES[0],), (NAMES[1],), NAMES):
                    _open(options, url, names, requests, rate, number, runs)
            _closed(options, url, NAMES, requests, "together, full", runs)
    return runs, {"capacity_qps": capacity, "rate_qps": rate}


def _closed(
    options: argparse.Namespace,
    url: str,
    names: Sequence[str],
    requests: Sequence[Request],
    title: str,
    runs: Runs,
) -> None:
    warm = Step("closed", 1)
    asyncio.run(measured(url, names, warm, requests, 0.01, options.seed))
    step = Step("closed", options.users)
    found = asyncio.run(
        measured(url, names, step, requests, options.duration / 2, options.seed)
    )
    _note(found, title, runs)


def _open(
    options: argparse.Namespace,
    url: str,
    names: Sequence[str],
    requests: Sequence[Request],
    rate: float,
    number: int,
    runs: Runs,
) -> None:
    step, seed = Step("open", rate), options.seed + 101 * number
    found = asyncio.run(measured(url, names, step, requests, options.duration, seed))
    _note(found, "together" if len(names) > 1 else "alone", runs)


def _note(found: dict[str, Figures], title: str, runs: Runs) -> None:
    for name, values in found.items():
        show(f"{title} {name}", values)
        runs.setdefault(f"{title} {name}", []).append(values)


def added(steps: dict[str, Figures]) -> Figures:
    """Returns what a neighbour adds at P99, in ms: the worse of the two models.

    Args:
        steps: Figures of each step by its name.
    """
    return {
        f"{what}_p99": round(
            max(
                steps[f"together {name}"][f"{what}_p99"]
                - steps[f"alone {name}"][f"{what}_p99"]
                for name in NAMES
            ),
            2,
        )
        for what in ("queue_ms", "ttft_ms", "total_ms")
    }


def throughput(steps: dict[str, Figures]) -> Figures:
    """Returns output tokens per second at full load, and ratios of them."""
    rate = "output_tokens_per_s"
    both = sum(steps[f"together, full {name}"][rate] for name in NAMES)
    alone = steps[f"alone, full {NAMES[0]}"][rate]
    whole = steps[f"whole host {NAMES[0]}"][rate]
    return {
        "together_tokens_per_s": round(both, 1),
        "alone_tokens_per_s": alone,
        "whole_host_tokens_per_s": whole,
        "together_over_whole_host": round(both / whole, 3),
        "together_over_alone": round(both / alone, 3),
    }


def problems_of(steps: dict[str, Figures], extra: Figures) -> list[str]:
    """What is wrong with the run, or missed."""
    problems = [
        f"{name}: {found['failed']:g} requests failed"
        for name, found in steps.items()
        if found["failed"]
    ]
    problems += [
        f"{name}: P99 of sending was {found['send_lag_ms_p99']:.0f} ms late"
        for name, found in steps.items()
        if not name.startswith(("whole", "alone, full", "together, full"))
        and found["send_lag_ms_p99"] > LATE_MS
    ]
    if extra["queue_ms_p99"] > TARGET_MS:
        problems.append(
            f"a neighbour adds {extra['queue_ms_p99']:.0f} ms to P99 in the queue; at "
            f"most {TARGET_MS:g} were to be"
        )
    return problems


def main() -> int:
    """Runs the benchmark; 1 when the target is missed."""
    options = arguments()
    quiet_logs()
    facts = machine()
    runs, rates = measure(options)
    steps = {name: joined(found) for name, found in runs.items()}
    extra, rate = added(steps), throughput(steps)
    show("added by a neighbour, P99", extra)
    show("throughput", rate)
    report: dict[str, object] = {
        "benchmark": "mixed_models",
        "machine": facts,
        "model": options.model,
        "engine": options.engine,
        "share": options.share,
        "load": options.load,
        "duration_s": options.duration,
        "rounds": options.rounds,
        **rates,
        "steps": steps,
        "added_ms": extra,
        "throughput": rate,
        "problems": problems_of(steps, extra),
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
