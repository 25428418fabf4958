"""Output tokens per second through the engine, against another way, in one call.

    python bench/engine.py --workload bench/workloads/mixed.jsonl --against hf-static

Each side runs alone in its own process, one after the other, with the same prompts,
the same forced output lengths and at most 16 sequences at once. Exits with 1 when the
rows counted at the model's first linear layer are not the tokens that were scheduled,
or when --require-ratio is missed. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from engine_ours import run_ours
from engine_static import run_static
from engine_workload import Item, output_tokens, read_workload

from tokenmill.workers.engine.model.resolve import resolve_model

Figures = dict[str, float]


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent
    add = parser.add_argument
    add("--workload", type=Path, default=here / "workloads" / "mixed.jsonl")
    add("--against", choices=["hf-static", "none"], default="hf-static")
    add("--model", default="smollm2-135m", help="built-in name, directory or hub id")
    add("--weights", choices=["int8", "float32"], default="int8")
    add("--kv", choices=["int8", "float32"], default="int8")
    add("--max-running", type=int, default=16)
    add("--prefill-chunk", type=int, default=512)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--limit", type=int, help="take only the first N requests")
    add("--require-ratio", type=float, help="fail below this ratio")
    return parser.parse_args()


def in_own_process(
    function: Callable[..., Figures], *args: object, **kwargs: object
) -> Figures:
    """Runs one side in a fresh process, so that neither inherits threads or memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def show(title: str, figures: Figures) -> None:
    """Prints one side's figures."""
    print(f"\n{title}")
    for name, value in figures.items():
        text = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        print(f"  {name:<24}{text:>14}")


def problems_of(ours: Figures) -> list[str]:
    """Says where the rows that were computed are not the tokens that were scheduled."""
    rows, tokens = ours["gemm_rows"], ours["scheduled_tokens"]
    if rows == tokens:
        return []
    counted = f"{rows} rows went through the first linear layer"
    return [f"{counted}, but {tokens} tokens were scheduled"]


def run_other(
    options: argparse.Namespace, model: Path, items: list[Item], ours: Figures
) -> dict[str, object]:
    """Runs the other side, shows it, and returns its part of the report."""
    other = in_own_process(
        run_static,
        model,
        items,
        batch_size=options.max_running,
        threads=options.threads,
    )
    show(f"generate, static batches of {options.max_running}, float32", other)
    ratio = ours["output_tokens_per_s"] / other["output_tokens_per_s"]
    # Processor time tells more than the clock on a machine with other work.
    cpu_ratio = other["cpu_s"] / ours["cpu_s"]
    print(f"\nratio {ratio:.2f} by the clock, {cpu_ratio:.2f} by processor time")
    return {
        "against": options.against,
        "other": other,
        "ratio": ratio,
        "cpu_ratio": cpu_ratio,
    }


def main() -> int:
    """Runs the benchmark."""
    options = parse()
    model = resolve_model(options.model, None)
    items = read_workload(options.workload, model, options.limit)
    print(
        f"{len(items)} requests, {sum(len(i.token_ids) for i in items):,} prompt and "
        f"{output_tokens(items):,} output tokens, {options.threads} threads, "
        f"weights {options.weights}, KV {options.kv}"
    )
    ours = in_own_process(
        run_ours,
        model,
        items,
        weights=options.weights,
        kv=options.kv,
        max_running=options.max_running,
        prefill_chunk=options.prefill_chunk,
        threads=options.threads,
    )
    show("tokenmill engine", ours)
    report: dict[str, object] = {
        "benchmark": "engine",
        "machine": f"{platform.machine()}, {options.threads} threads",
        "requests": len(items),
        "weights": options.weights,
        "kv": options.kv,
        "ours": ours,
    }
    problems = problems_of(ours)
    if options.against == "hf-static":
        report |= run_other(options, model, items, ours)
        least, ratio = options.require_ratio, report["ratio"]
        if least and ratio < least:
            problems.append(f"ratio {ratio:.2f} is below {least}")
    report["problems"] = problems
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(json.dumps(report))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
