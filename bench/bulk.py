"""Bulk work: what is lost when processes die, how fast it is, what others feel of it.

    python bench/bulk.py [--documents 40] [--report]
    python bench/bulk.py --documents 3 --prompts 16 --rounds 1 --interactive 4

Real documents are summarized while the worker and the command are killed with -9; then
the same prompts run through `bulk run` and through the engine alone, in turns, with the
same threads; then an interactive prompt is timed without bulk work and beside it. With
`--lines N` instead, N lines go through a pool whose engine answers at once. The last
line is one JSON object.
"""

import argparse
from pathlib import Path

import bulk_lines
import bulk_loss
import bulk_rate
import bulk_ttft
from bulk_pool import BulkPool, up
from harness import cores, finish, machine, new_parser, quiet_logs, show

from tokenmill.workers.engine.model.resolve import resolve_model

RATE_TARGET = 0.9
"""Of the bare engine's tokens per second."""
TTFT_TARGET = 2.0
"""Times that of an idle pool, in the median."""
PARTS = ("loss", "rate", "ttft")


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--documents", type=int, default=40, help="the shortest, if fewer than 40")
    add("--max-words", type=int, default=100)
    add("--window-tokens", type=int, default=1024)
    add("--prompts", type=int, default=64, help="of the comparison with the engine")
    add("--prompt-tokens", type=int, default=256)
    add("--output-tokens", type=int, default=64)
    add("--rounds", type=int, default=2)
    add("--interactive", type=int, default=20, help="timed alone, and beside bulk")
    add("--interactive-tokens", type=int, default=200, help="of their prompts")
    add("--threads", type=int, default=cores())
    add("--only", default=",".join(PARTS), help="which parts, with commas")
    add("--lines", type=int, default=0, help="this many lines, and nothing else")
    add("--require-targets", action="store_true", help="fail when one is missed")
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser.parse_args()


def measured(options: argparse.Namespace, model: Path) -> tuple[dict, list[str]]:
    """Runs the parts that are asked for."""
    wanted = options.only.split(",")
    figures: dict[str, object] = {}
    problems: list[str] = []
    if "loss" in wanted:
        found, problems = bulk_loss.measure(
            options.model,
            options.documents,
            max_words=options.max_words,
            window_tokens=options.window_tokens,
        )
        figures["loss"] = found
        show("documents, worker and command killed", found)
    if {"rate", "ttft"} & set(wanted):
        with up(options.model, threads=options.threads) as pool:
            if "rate" in wanted:
                figures["rate"] = rate_of(pool, options, model)
                show("bulk against the bare engine", figures["rate"])
            if "ttft" in wanted:
                figures["ttft"] = ttft_of(pool, options, model)
                show("time to first token", figures["ttft"])
    return figures, problems


def rate_of(
    pool: BulkPool, options: argparse.Namespace, model: Path
) -> dict[str, object]:
    """Bulk against the bare engine."""
    return bulk_rate.measure(
        pool,
        options.model,
        model,
        count=options.prompts,
        tokens=options.prompt_tokens,
        output=options.output_tokens,
        rounds=options.rounds,
        threads=options.threads,
    )


def ttft_of(
    pool: BulkPool, options: argparse.Namespace, model: Path
) -> dict[str, object]:
    """Interactive jobs alone and beside bulk."""
    count = options.interactive
    prompts = bulk_rate.prompts_of(model, 8 * count, options.prompt_tokens)
    asked = bulk_rate.prompts_of(
        model, 2 * count + bulk_ttft.WARM, options.interactive_tokens, backwards=True
    )
    return bulk_ttft.measure(pool, options.model, prompts, asked, options.output_tokens)


def missed(figures: dict) -> list[str]:
    """Targets that were measured and not met."""
    found = []
    ratio = figures.get("rate", {}).get("bulk_to_engine", RATE_TARGET)
    if ratio < RATE_TARGET:
        found.append(f"bulk at {ratio:.2f} of the engine's rate, not {RATE_TARGET}")
    ttft = figures.get("ttft", {})
    if ttft.get("ttft_p50_ratio", 0.0) > TTFT_TARGET:
        found.append(f"ttft {ttft['ttft_p50_ratio']:.2f} times, not {TTFT_TARGET}")
    if not ttft.get("bulk_outlasted_it", True):
        found.append("the bulk run ended before the interactive jobs: more prompts")
    return found


def main() -> int:
    """Measures, judges and reports."""
    options = arguments()
    quiet_logs()
    report: dict[str, object] = {"benchmark": "bulk", "machine": machine()}
    if options.lines:
        figures: dict = {"lines": bulk_lines.measure(options.lines)}
        show("lines", figures["lines"])
        report["benchmark"] = "bulk_lines"
        lines = figures["lines"]
        problems = [] if lines["written"] == lines["lines"] else ["lines are missing"]
    else:
        figures, problems = measured(options, resolve_model(options.model, None))
    report |= {"options": vars(options), **figures}
    report |= {"targets": {"bulk_to_engine": RATE_TARGET, "ttft": TTFT_TARGET}}
    report["missed"] = missed(figures)
    if options.require_targets:
        problems += report["missed"]  # type: ignore[operator]
    report["problems"] = problems
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
