"""Two models side by side in one pool, against each alone there.

    python bench/mixed_models.py [--model smollm2-135m] [--share 0.5] [--load 0.6]
                                 [--requests 50] [--rounds 3] [--report]

Both are the same checkpoint under two names, with a share of the host each
(`models.share`; 0 lets both use every core). First, warm, a closed loop saturates both
at once: what each then does, counted while that is steady, is what it can do beside its
neighbour. An open loop (Poisson) then offers `--load` of that to the first alone, to
the second alone, and to both, the same requests at the same moments; rounds take turns,
so that a drift of the machine favours nobody; percentiles are of all rounds together.
What a model feels of its neighbour is the difference of P99: of the wait in the queue,
which has a target (50 ms), of the first token, and of the whole time. The target is
judged only where the load was really reached. Throughput: both saturated at once,
against each alone in its share, and against one model that has the whole host.

The last line is one JSON object with every figure. In seconds:
`python bench/mixed_models.py --engine echo:5 --requests 20 --rounds 1 --warm-up 1 \
--window 2 --limit-tokens 8`.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Figures, finish, machine, quiet_logs, show
from model_load import ModelSide, Window, doubts, figures_of, offered, saturated
from model_pool import asked, checkpoint, parser_of, requests_of, running

from tokenmill import Client

TARGET_MS = 50.0
"""Added wait in the queue at P99, at most."""
NAMES = ("model-1", "model-2")
SITUATIONS = ((NAMES[0],), (NAMES[1],), NAMES)
"""Who has load, in the order of a round."""
TIMES = ("queue_ms", "ttft_ms", "total_ms")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--share", type=float, default=0.5, help="of each; 0: none is set")
    add("--load", type=float, default=0.6, help="part of what each can do beside other")
    add("--requests", type=int, default=50, help="of each model in a round, at least")
    add("--warm-up", type=float, default=10.0, help="seconds, before a window counts")
    return parser.parse_args(words)


def tables(
    options: argparse.Namespace, path: str, names: Sequence[str]
) -> list[dict[str, object]]:
    """The settings of the models; one alone has the whole host."""
    share = {"share": options.share} if options.share and len(names) > 1 else {}
    return [{"name": name, "path": path, **share} for name in names]


class Run:
    """Puts load on pools and keeps what was found.

    Args:
        options: What was asked for.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.full: dict[str, Figures] = {}
        """Rates of each model at full load, by situation."""
        self.steps: dict[str, Figures] = {}
        """Figures of each model at a part of it, by situation."""
        self._options = options
        self._requests = requests_of(options)

    async def whole_host(self, url: str) -> None:
        """One model in a pool of its own."""
        async with Client(url) as mill:
            await self._saturate("whole host", [ModelSide(mill, NAMES[0])])

    async def shared_host(self, url: str) -> None:
        """Two models in one pool."""
        options = self._options
        async with Client(url) as mill:
            sides = {name: ModelSide(mill, name) for name in NAMES}
            await self._saturate("together, full", list(sides.values()))
            for side in sides.values():
                await self._saturate("alone, full", [side])
            rates = {n: options.load * v for n, v in self.capacity().items()}
            await self._offer(sides, rates)

    def capacity(self) -> dict[str, float]:
        """Requests per second that each model can do beside its neighbour."""
        return {name: self.full[f"together, full {name}"]["qps"] for name in NAMES}

    async def _saturate(self, title: str, sides: Sequence[ModelSide]) -> None:
        found = await saturated(
            sides,
            self._requests,
            users=self._options.users,
            ramp_s=self._options.warm_up,
            window_s=self._options.window,
            label=title,
        )
        for name, rates in found.items():
            show(f"{title} {name}", rates)
            self.full[f"{title} {name}"] = rates

    async def _offer(
        self, sides: Mapping[str, ModelSide], rates: Mapping[str, float]
    ) -> None:
        windows: dict[str, list[Window]] = {}
        # A workload that is shorter than what was asked for goes round.
        duration_s = self._options.requests / min(rates.values())
        for number in range(self._options.rounds):
            for names in SITUATIONS:
                title = "together" if len(names) > 1 else "alone"
                found = await offered(
                    [sides[name] for name in names],
                    self._requests,
                    rates=rates,
                    duration_s=duration_s,
                    seed=self._options.seed + number,
                    label=f"{title}-{number}",
                )
                for name, window in found.items():
                    windows.setdefault(f"{title} {name}", []).append(window)
        capacity = self.capacity()
        for title, kind in windows.items():
            self.steps[title] = figures_of(kind, capacity[title.split()[-1]])
            show(title, self.steps[title])


def added(steps: Mapping[str, Figures]) -> Figures:
    """Returns what a neighbour adds, in ms: the worse of the two models.

    Args:
        steps: Figures of each step by its name.
    """
    return {
        f"{what}_{part}": round(
            max(
                steps[f"together {name}"][f"{what}_{part}"]
                - steps[f"alone {name}"][f"{what}_{part}"]
                for name in NAMES
            ),
            2,
        )
        for what in TIMES
        for part in ("p50", "p95", "p99")
    }


def throughput(full: Mapping[str, Figures]) -> Figures:
    """Returns output tokens per second at full load, and ratios of them."""
    rate = "output_tokens_per_s"
    both, alone = (
        sum(full[f"{title}, full {name}"][rate] for name in NAMES)
        for title in ("together", "alone")
    )
    whole = full[f"whole host {NAMES[0]}"][rate]
    return {
        "together_tokens_per_s": round(both, 1),
        "alone_tokens_per_s": round(alone, 1),
        "whole_host_tokens_per_s": whole,
        "together_over_whole_host": round(both / whole, 3),
        "together_over_alone": round(both / alone, 3),
    }


def problems_of(
    full: Mapping[str, Figures],
    steps: Mapping[str, Figures],
    extra: Figures,
    load: float,
) -> tuple[str, list[str]]:
    """Whether the target is met, missed or cannot be judged, and what is wrong.

    Args:
        full: Rates at full load by name.
        steps: Figures of each step at a part of it by name.
        extra: What a neighbour adds.
        load: That was wanted, as a part of what a model can do.
    """
    problems = [
        f"{name}: {found['failed']:g} requests failed"
        for name, found in {**full, **steps}.items()
        if found["failed"]
    ]
    problems += doubts(steps, load)
    if problems:
        return "not judged", problems
    over = extra["queue_ms_p99"]
    if over <= TARGET_MS:
        return "met", []
    missed = f"a neighbour adds {over:.0f} ms to P99 in the queue"
    return "missed", [f"{missed}; at most {TARGET_MS:g} were to be"]


def main() -> int:
    """Runs the benchmark; 1 when the target is missed or could not be judged."""
    options = arguments()
    quiet_logs()
    facts = machine()
    run = Run(options)
    path = checkpoint(options.model, options.engine)
    common = (options.engine, options.max_running)
    with tempfile.TemporaryDirectory(prefix="mixed-") as directory:
        one, two = Path(directory) / "1", Path(directory) / "2"
        one.mkdir()
        two.mkdir()
        with running(one, tables(options, path, NAMES[:1]), *common) as url:
            asyncio.run(run.whole_host(url))
        with running(two, tables(options, path, NAMES), *common) as url:
            asyncio.run(run.shared_host(url))
    extra, rate = added(run.steps), throughput(run.full)
    show("added by a neighbour", extra)
    show("throughput", rate)
    verdict, problems = problems_of(run.full, run.steps, extra, options.load)
    report: dict[str, object] = {
        "benchmark": "mixed_models",
        "machine": facts,
        **asked(options, "share"),
        "capacity_qps": run.capacity(),
        "full": run.full,
        "steps": run.steps,
        "added_ms": extra,
        "target_ms": TARGET_MS,
        "verdict": verdict,
        "throughput": rate,
        "problems": problems,
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    sys.exit(main())
