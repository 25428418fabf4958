"""Load through the client and through the gateway, open and closed loop, in one run.

    python bench/load.py [--engine model|echo:20] [--rates 1,2,4] [--users 1,4,16]
                         [--batch-sizes 8,16] [--duration 20] [--output load.md]
    python bench/load.py --url redis://… --gateway http://… --key tm-… --model NAME

Starts a pool and a gateway of its own unless `--url` or `--gateway` names one. In the
open loop requests arrive as a Poisson process whether or not earlier ones are answered,
and latency counts from when a request was to be sent, so that a slow system cannot
hide its waits (coordinated omission). In the closed loop so many users each wait for
their answer and ask again. Client and gateway take turns at every step of the load.

Reports QPS, time to first token, time of a token, gaps between deliveries, whole time
(P50, P95, P99), real-time factor, goodput under an objective, memory; as Markdown with
plots, and as one JSON object in the last line. What each figure means stands at the
end of the report.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import finish, machine, new_parser, quiet_logs, show
from load_drive import drive
from load_measure import WORDS_PER_MINUTE, Objective, figures
from load_plan import WORKLOAD, Step, distinct, read_workload, shuffled, steps
from load_pool import Peak, Target, own_pool
from load_report import Row, write_report
from load_sides import ClientSide, GatewaySide, Side

WARM = Step("closed", 4)
"""Load before the first step: the engine learns what its steps take."""
LATE_MS = 50.0
"""When P99 of sending is later than this the generator itself was too slow."""


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part.strip()]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--url", help="Redis of a pool that runs already")
    add("--gateway", help="address of a gateway that runs already")
    add("--key", help="API key for it")
    add("--model", help="public name; of an own pool, smollm2-135m or echo")
    add("--engine", default="model", help="of an own pool: model or echo:<ms a step>")
    add("--through", default="client,gateway", help="sides, with commas")
    add("--rates", type=_numbers, default="1,2,4", help="open loop, requests/s")
    add("--users", type=_numbers, default="1,4,16", help="closed loop, at once")
    add("--batch-sizes", type=_numbers, default="16", help="worker.max_running")
    add("--duration", type=float, default=20.0, help="seconds of each step")
    add("--warm-up", type=float, default=5.0, help="seconds on each side, before")
    add("--workload", type=Path, default=WORKLOAD, help="JSONL: prompt, max_tokens")
    add("--limit-tokens", type=int, help="most output tokens of a request")
    add("--slo-ttft-ms", type=float, default=2000.0)
    add("--slo-token-ms", type=float, default=250.0)
    add("--words-per-minute", type=float, default=WORDS_PER_MINUTE)
    add("--seed", type=int, default=1)
    add("--output", type=Path, default=Path("load.md"), help="the report")
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser.parse_args(words)


@contextlib.contextmanager
def targets(options: argparse.Namespace, batch_size: int) -> Iterator[Target]:
    """The pool that was named, or one of our own."""
    if options.url or options.gateway:
        model = options.model or "smollm2-135m"
        yield Target(model, options.url, options.gateway, options.key)
        return
    model = options.model or ("smollm2-135m" if options.engine == "model" else "echo")
    with (
        tempfile.TemporaryDirectory() as directory,
        own_pool(
            Path(directory), engine=options.engine, model=model, batch_size=batch_size
        ) as target,
    ):
        yield target


def sides(options: argparse.Namespace, target: Target) -> list[Side]:
    """The ways in that were asked for and are there."""
    wanted = options.through.split(",")
    made: list[Side] = []
    if "client" in wanted and target.url is not None:
        made.append(ClientSide(target.url, target.model))
    if "gateway" in wanted and target.gateway is not None:
        made.append(GatewaySide(target.gateway, target.model, target.key))
    if not made:
        raise SystemExit(f"nothing to measure: no address for {options.through}")
    return made


async def measure(
    options: argparse.Namespace, target: Target, plan: list[Step], batch: int | None
) -> list[Row]:
    """Runs every step on every side, sides in turn, and returns the figures."""
    objective = Objective(options.slo_ttft_ms, options.slo_token_ms)
    requests = read_workload(options.workload, options.limit_tokens)
    rows: list[Row] = []
    async with contextlib.AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(s) for s in sides(options, target)]
        # Of this run alone: a pool that was named may have seen the prompts before.
        label = f"{random.randrange(16**6):06x}"
        for way in ways:  # connections, caches and the engine's first steps
            prompts = distinct(shuffled(requests, 0), f"{label}-{way.name}")
            await drive(way, WARM, prompts, options.warm_up, 0)
        for number, step in enumerate(plan):
            # Who goes first changes, so that a drift of the machine favours neither.
            for way in ways if number % 2 == 0 else ways[::-1]:
                seed = options.seed + number
                peak = Peak(target)
                watching = asyncio.create_task(peak.watch())
                prompts = distinct(
                    shuffled(requests, seed), f"{label}-{number}-{way.name}"
                )
                samples = await drive(way, step, prompts, options.duration, seed)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                closed_s = options.duration if step.mode == "closed" else None
                found = figures(
                    samples, objective, options.words_per_minute, closed_s=closed_s
                )
                show(f"{step.name} through the {way.name}", found)
                rows.append(
                    Row(
                        side=way.name,
                        mode=step.mode,
                        level=step.level,
                        batch_size=batch,
                        figures=found,
                        memory_mib=peak.mib,
                    )
                )
    return rows


def problems_of(rows: list[Row]) -> list[str]:
    """What makes the figures untrustworthy."""
    problems: list[str] = []
    for row in rows:
        found, name = row["figures"], f"{row['mode']} {row['level']:g}, {row['side']}"
        if found["failed"]:
            problems.append(f"{name}: {found['failed']:g} requests failed")
        if not found["qps"]:
            problems.append(
                f"{name}: no request ended in the part of the step that counts; make "
                "--duration longer"
            )
        if row["mode"] == "open" and found["send_lag_ms_p99"] > LATE_MS:
            late = found["send_lag_ms_p99"]
            problems.append(
                f"{name}: P99 of sending was {late:.0f} ms late; more than the "
                "generator can send from here"
            )
    return problems


def main() -> int:
    """Runs the load test."""
    options = arguments()
    quiet_logs()
    facts = machine()
    plan = steps(options.rates, [int(count) for count in options.users])
    foreign = bool(options.url or options.gateway)
    batches = [None] if foreign else [int(size) for size in options.batch_sizes]
    rows: list[Row] = []
    for batch in batches:
        with targets(options, batch or 0) as target:
            rows += asyncio.run(measure(options, target, plan, batch))
    shown = {
        **facts,
        "engine": "as found" if foreign else options.engine,
        "seconds of each step": options.duration,
        "objective": f"first token within {options.slo_ttft_ms:g} ms, "
        f"{options.slo_token_ms:g} ms a token",
        "reading rate": f"{options.words_per_minute:g} words a minute",
    }
    problems = problems_of(rows)
    write_report(options.output, rows, shown, problems)
    print(f"wrote {options.output}", file=sys.stderr)
    report: dict[str, object] = {
        "benchmark": "load",
        "machine": facts,
        "engine": shown["engine"],
        "duration_s": options.duration,
        "objective": {
            "ttft_ms": options.slo_ttft_ms,
            "per_token_ms": options.slo_token_ms,
        },
        "words_per_minute": options.words_per_minute,
        "steps": rows,
        "problems": problems,
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
