"""One instruction over many prompts: with the prefix cache and without, in one run.

    python bench/prefix.py [--report]

64 prompts of real text begin with the same 300 tokens, each goes on with 40 tokens of
its own, and 16 tokens are generated. Both ways run in turn on the same model; each
starts with an empty cache, and their outputs must be equal. The last line is JSON.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_ours import drain, requests_of
from engine_workload import Item, read_text
from harness import Figures, cores, finish, in_own_process, machine, quiet_logs, show

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.resolve import resolve_model

if TYPE_CHECKING:
    from tokenmill.workers.engine.batch import ModelRunner

TARGET = 3.0
"""How many times faster the cache must make this workload."""


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--prompts", type=int, default=64)
    add("--shared", type=int, default=300, help="tokens that all prompts begin with")
    add("--own", type=int, default=40, help="tokens of each prompt's own")
    add("--output", type=int, default=16)
    add("--repeat", type=int, default=2)
    add("--threads", type=int, default=cores())
    add("--require-target", action="store_true", help=f"fail below {TARGET} times")
    add("--report", action="store_true", help="save, and write docs/benchmarks.md")
    return parser.parse_args()


def items_of(
    text: list[int], prompts: int, shared: int, own: int, output: int
) -> list[Item]:
    """Builds the prompts from a text: its beginning, then a piece of its own each."""
    if len(text) < shared + prompts * own:
        raise SystemExit(f"the text has {len(text)} tokens, too few for the prompts")
    pieces = [text[shared + n * own : shared + (n + 1) * own] for n in range(prompts)]
    return [
        Item(f"p{n}", (*text[:shared], *piece), output)
        for n, piece in enumerate(pieces)
    ]


def run(model: Path, items: list[Item], *, repeat: int, threads: int) -> Figures:
    """Runs all prompts with and without the cache, in turn.

    Returns:
        The best of the tries: seconds, output tokens per second, their ratio; the hit
        rate; and whether all outputs were equal (1.0) or not.
    """
    runner = load_runner(model, threads=threads)
    table = TokenTable.from_directory(model)
    _once(runner, table, items[:2], cache=False)  # warm
    best = {True: float("inf"), False: float("inf")}
    hit_rate, equal = 0.0, True
    outputs: dict[str, list[int]] = {}
    for _ in range(repeat):
        for cache in (False, True):
            seconds, tokens, hits = _once(runner, table, items, cache=cache)
            best[cache] = min(best[cache], seconds)
            outputs = outputs or tokens
            equal = equal and tokens == outputs
            hit_rate = max(hit_rate, hits)
    produced = sum(item.max_tokens for item in items)
    return {
        "with_cache_s": best[True],
        "without_cache_s": best[False],
        "with_cache_output_tokens_per_s": produced / best[True],
        "without_cache_output_tokens_per_s": produced / best[False],
        "ratio": best[False] / best[True],
        "hit_rate_percent": 100 * hit_rate,
        "outputs_equal": float(equal),
    }


def _once(
    runner: "ModelRunner", table: TokenTable, items: list[Item], *, cache: bool
) -> tuple[float, dict[str, list[int]], float]:
    """Returns seconds, each request's tokens, and the hit rate."""
    engine = Engine(runner, table, prefix_cache=cache)
    began = time.perf_counter()
    for request in requests_of(items):
        engine.add(request)
    tokens = drain(engine)
    seconds = time.perf_counter() - began
    engine.check_integrity()
    capacity = engine.capacity()
    asked = capacity.prefix_tokens_asked
    return seconds, tokens, capacity.prefix_tokens_hit / asked if asked else 0.0


def main() -> int:
    """Runs the benchmark."""
    options = parse()
    quiet_logs()
    host = machine()
    model = resolve_model(options.model, None)
    text = read_text(model, options.shared + options.prompts * options.own)
    items = items_of(text, options.prompts, options.shared, options.own, options.output)
    figures = in_own_process(
        run, model, items, repeat=options.repeat, threads=options.threads
    )
    show("prefix cache", figures)
    problems = [] if figures["outputs_equal"] else ["outputs differ with the cache"]
    if options.require_target and figures["ratio"] < TARGET:
        problems.append(f"{figures['ratio']:.2f} times as fast, wanted {TARGET}")
    report: dict[str, object] = {
        "benchmark": "prefix",
        "machine": host,
        "prompts": options.prompts,
        "shared_tokens": options.shared,
        "own_tokens": options.own,
        "output_tokens": options.output,
        "repeat": options.repeat,
        "target": TARGET,
        **figures,
        "problems": problems,
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
