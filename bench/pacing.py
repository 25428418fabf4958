"""Time between tokens of running sequences while a long prompt comes in.

    python bench/pacing.py [--report]

Eight sequences decode. Every so often a prompt of 2000 tokens arrives, and its prefill
shares the steps. Measured, in turn: gaps between the tokens of the running sequences in
quiet stretches, and from a long prompt's arrival until its first token; with the
chunk that follows the step time, and with whole chunks. The last line is JSON.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_ours import checked, requests_of
from engine_rates import prompts
from engine_workload import Item, read_text
from harness import (
    Figures,
    cores,
    finish,
    in_own_process,
    machine,
    percentile,
    quiet_logs,
    show,
)

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.resolve import resolve_model

if TYPE_CHECKING:
    from tokenmill.workers.engine.batch import ModelRunner

TARGET = 2.0
"""P99 with the long prompt, as a multiple of P99 without it, at most."""
RUNNING_PROMPT = 100
"""Tokens that each running sequence begins with."""


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--running", type=int, default=8, help="sequences that decode")
    add("--long", type=int, default=2000, help="tokens of the prompt that arrives")
    add("--arrivals", type=int, default=3, help="how often it arrives")
    add("--quiet-steps", type=int, default=60, help="steps before each arrival")
    add("--threads", type=int, default=cores())
    add("--require-target", action="store_true", help=f"fail above {TARGET} times")
    add("--report", action="store_true", help="save, and write docs/benchmarks.md")
    return parser.parse_args()


class Gaps:
    """Times between the tokens of each running sequence, in milliseconds."""

    def __init__(self) -> None:
        self.all_ms: list[float] = []
        self._last: dict[str, float] = {}

    def step(self, engine: Engine) -> set[str]:
        """Runs a step, enters the gaps that end with it, says who got a token."""
        output = checked(engine.step())
        now = time.perf_counter()
        got = {delta.request_id for delta in output.deltas if delta.token_ids}
        for name in got:
            if name in self._last and not name.startswith("long"):
                self.all_ms.append(1e3 * (now - self._last[name]))
            self._last[name] = now
        return got

    def take(self) -> list[float]:
        """Returns the gaps since the last call."""
        taken, self.all_ms = self.all_ms, []
        return taken


def run(
    model: Path,
    text: list[int],
    *,
    running: int,
    long: int,
    arrivals: int,
    quiet_steps: int,
    threads: int,
) -> Figures:
    """Measures gaps with the paced chunk and with whole chunks.

    Returns:
        P50 and P99 in milliseconds of quiet and of busy stretches, the time from the
        long prompt's arrival to its first token, and the ratios; `whole_…` are those
        without pacing.
    """
    runner = load_runner(model, threads=threads)
    table = TokenTable.from_directory(model)
    figures: Figures = {}
    for prefix, paced in (("", True), ("whole_", False)):
        found = _measure(
            _engine(runner, table, running, paced=paced),
            text,
            running=running,
            long=long,
            arrivals=arrivals,
            quiet_steps=quiet_steps,
        )
        figures |= {prefix + name: value for name, value in found.items()}
    return figures


def _engine(
    runner: "ModelRunner", table: TokenTable, running: int, *, paced: bool
) -> Engine:
    target = None if paced else 0.0  # None follows the step time, 0 is no bound
    return Engine(runner, table, max_running=running + 1, step_target_ms=target)


def _measure(
    engine: Engine,
    text: list[int],
    *,
    running: int,
    long: int,
    arrivals: int,
    quiet_steps: int,
) -> Figures:
    gaps = Gaps()
    for request in requests_of(prompts(text, running, RUNNING_PROMPT, 4000)):
        engine.add(request)
    while engine.capacity().prefill_backlog:
        gaps.step(engine)
    for _ in range(quiet_steps):  # the step-time fit settles
        gaps.step(engine)
    gaps.take()
    quiet: list[float] = []
    busy: list[float] = []
    prefill_ms: list[float] = []
    for number in range(arrivals):
        for _ in range(quiet_steps):
            gaps.step(engine)
        quiet += gaps.take()
        name, start = f"long-{number}", running * RUNNING_PROMPT + number * long
        long_prompt = Item(name, tuple(text[start : start + long]), 1)
        began = time.perf_counter()
        engine.add(requests_of([long_prompt])[0])
        while name not in gaps.step(engine):
            pass
        prefill_ms.append(1e3 * (time.perf_counter() - began))
        busy += gaps.take()
    engine.abort_all()
    return summary(quiet, busy) | {"prefill_ms": sum(prefill_ms) / len(prefill_ms)}


def summary(quiet: list[float], busy: list[float]) -> Figures:
    """Returns P50 and P99 of both, the largest, and the ratio of the P99s.

    Args:
        quiet: Gaps without a long prompt, in milliseconds.
        busy: Gaps while one came in, in milliseconds.
    """
    figures: Figures = {}
    for name, gaps in (("quiet", quiet), ("busy", busy)):
        figures[f"{name}_p50_ms"] = percentile(gaps, 0.5)
        figures[f"{name}_p99_ms"] = percentile(gaps, 0.99)
        figures[f"{name}_max_ms"] = max(gaps)
    ratio = figures["busy_p99_ms"] / figures["quiet_p99_ms"]
    return figures | {"p99_ratio": ratio}


def main() -> int:
    """Runs the benchmark."""
    options = parse()
    quiet_logs()
    host = machine()
    model = resolve_model(options.model, None)
    needed = options.running * RUNNING_PROMPT + options.arrivals * options.long
    shape = {
        "running": options.running,
        "long": options.long,
        "arrivals": options.arrivals,
        "quiet_steps": options.quiet_steps,
        "threads": options.threads,
    }
    figures = in_own_process(run, model, read_text(model, needed), **shape)
    show("time between tokens", figures)
    problems = []
    if options.require_target and figures["p99_ratio"] > TARGET:
        problems.append(f"P99 is {figures['p99_ratio']:.2f} times, wanted {TARGET}")
    report: dict[str, object] = {
        "benchmark": "pacing",
        "machine": host,
        **shape,
        "target": TARGET,
        **figures,
        "problems": problems,
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
