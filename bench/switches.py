"""Switches between two versions under load, against the same load without them.

    python bench/switches.py [--model smollm2-135m] [--load 0.5] [--every 3]
                             [--requests 60] [--rounds 3] [--report]

One pool serves a model as `v1`; the same checkpoint is added and loaded as `v2`, so
that both lie in memory and share the cores. Warm, a closed loop finds what `v1` can do;
an open loop (Poisson) then offers `--load` of it in three situations, in turns, with
the same requests at the same moments: all on one version (`v1` and `v2` by round),
divided between both, and while jobs move every `--every` seconds: all to the other
version and back, a part of them, and a rollback.

Every job must have been taken once, have succeeded at its first attempt with as many
tokens as were asked for, and name the version that served it, the one of the route
where only one had a share; nothing may be among the dead letters. P99 of the whole time
with switches is to be within 1.5 times that on one version; percentiles are of all
rounds together. The last line is one JSON object. In seconds:
`python bench/switches.py --engine echo:50 --requests 20 --rounds 1 --every 0.4 \
--warm-up 1 --window 2 --limit-tokens 8`.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from harness import finish, machine, quiet_logs, show
from load_drive import closed_loop
from load_plan import distinct, shuffled
from model_load import ModelSide, Window, figures_of, offered, saturated
from model_pool import asked, checkpoint, parser_of, requests_of, running
from switches_check import (
    KINDS,
    TARGET,
    VERSIONS,
    lost,
    ratios,
    served,
    verdict_of,
    wrongly_served,
)

from tokenmill import Client
from tokenmill.producer.info import JobInfo
from tokenmill.shared.config_model import ModelConfig

MODEL = "model"
SETTLED_S = 0.5
"""After a switch: a plan that was begun before it is over by then."""
TURNS = (("v2", 100.0), ("v1", 100.0), ("v2", 30.0), ("v2", 100.0), None)
"""Version and percent of each switch, again and again; None goes back to before."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--load", type=float, default=0.5, help="part of what one version can do")
    add("--every", type=float, default=3.0, help="seconds between two switches")
    add("--requests", type=int, default=60, help="in a window")
    add("--warm-up", type=float, default=8.0, help="seconds, of each version")
    return parser.parse_args(words)


class Run:
    """Puts load on two versions and keeps what was found.

    Args:
        mill: A client of the pool.
        options: What was asked for.
    """

    def __init__(self, mill: Client, options: argparse.Namespace) -> None:
        self.capacity_qps = 0.0
        self.num_switches: list[int] = []
        """In each window with switches."""
        self.windows: dict[str, list[Window]] = {kind: [] for kind in KINDS}
        self.side = ModelSide(mill, MODEL)
        self._mill = mill
        self._options = options
        self._requests = requests_of(options)

    async def warm(self, path: str) -> None:
        """Loads the second version, warms both and finds what one can do."""
        config = ModelConfig(name=MODEL, version="v2", path=path)
        await self._mill.add_version(config)
        await self._mill.load_version(MODEL, "v2")
        options, side = self._options, self.side
        await self._switch("v2")
        prompts = distinct(shuffled(self._requests, 0), "warm")
        await closed_loop(side, options.users, prompts, options.warm_up)
        await self._switch("v1")
        found = await saturated(
            [side],
            self._requests,
            users=options.users,
            ramp_s=options.warm_up,
            window_s=options.window,
            label="full",
        )
        show("v1 saturated", found[MODEL])
        self.capacity_qps = found[MODEL]["qps"]

    async def rounds(self) -> None:
        """Every situation in every round."""
        for number in range(self._options.rounds):
            alone, other = VERSIONS if number % 2 == 0 else reversed(VERSIONS)
            await self._switch(alone)
            await self._window("one version", number)
            await self._switch(other, 50.0)
            await self._window("both", number)
            await self._switch("v1")
            over = asyncio.Event()
            moving = asyncio.create_task(self._switching(over))
            try:
                await self._window("switching", number)
            finally:
                over.set()
                self.num_switches.append(await moving)

    async def _switch(self, version: str, percent: float = 100.0) -> None:
        await self._mill.switch_version(MODEL, version, percent)
        await asyncio.sleep(SETTLED_S)

    async def _window(self, kind: str, number: int) -> None:
        rate = self._options.load * self.capacity_qps
        found = await offered(
            [self.side],
            self._requests,
            rates={MODEL: rate},
            duration_s=self._options.requests / rate,
            seed=self._options.seed + number,
            label=f"{kind.split()[0]}-{number}",
        )
        self.windows[kind].append(found[MODEL])

    async def _switching(self, over: asyncio.Event) -> int:
        """Moves jobs to and fro until it is over; how often."""
        made = 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._options.every)
                return made
            turn = TURNS[made % len(TURNS)]
            if turn is None:
                await self._mill.rollback_version(MODEL)
            else:
                await self._mill.switch_version(MODEL, *turn)
            made += 1

    async def infos(self) -> list[JobInfo]:
        """The records of all jobs, the first to warm up included."""
        return [await job.info() for job in self.side.jobs]


async def measured(
    url: str, path: str, options: argparse.Namespace
) -> dict[str, object]:
    """Runs everything; the figures."""
    async with Client(url) as mill:
        run = Run(mill, options)
        await run.warm(path)
        taken = len(run.side.jobs)
        await run.rounds()
        steps = {k: figures_of(w, run.capacity_qps) for k, w in run.windows.items()}
        for kind, found in steps.items():
            show(kind, found)
        samples = [
            s for found in run.windows.values() for w in found for s in w.samples
        ]
        wrong = [f"a job failed: {one.error}" for one in samples if one.error]
        wrong += lost(
            taken + len(samples), await run.infos(), len(await mill.dead_letters())
        )
        wrong += wrongly_served(run.windows)
    verdict, problems = verdict_of(steps, options.load, run.num_switches, wrong)
    return {
        "capacity_qps": run.capacity_qps,
        "jobs": len(samples),
        "switches": sum(run.num_switches),
        "steps": steps,
        "served_by": {kind: served(found) for kind, found in run.windows.items()},
        "ratios": ratios(steps),
        "target_ratio": TARGET,
        "verdict": verdict,
        "problems": problems,
    }


def main() -> int:
    """Runs the benchmark; 1 when the target is missed or could not be judged."""
    options = arguments()
    quiet_logs()
    facts = machine()
    path = checkpoint(options.model, options.engine)
    table: dict[str, object] = {"name": MODEL, "path": path}
    with tempfile.TemporaryDirectory(prefix="switches-") as folder:
        directory = Path(folder)
        common = (options.engine, options.max_running)
        with running(directory, [table], *common) as url:
            found = asyncio.run(measured(url, path, options))
    show("times with switches over those without", found["ratios"])  # type: ignore[arg-type]
    report: dict[str, object] = {
        "benchmark": "switches",
        "machine": facts,
        **asked(options, "every"),
        **found,
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
