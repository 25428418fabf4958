"""Perplexity and greedy agreement of every precision against exact float32.

    python bench/quality.py --tokens 100000 --precisions int8,int8-weights
    python bench/quality.py --all --tokens 20000 --slow-tokens 4000

All run through the engine's own model runner: packed steps, chunked prefill, paged KV,
the kernels and the calibration that a worker would use. The text is cut into windows;
in each, every token is predicted from those before it. The difference is paired: per
window, then a 95 % interval over windows. Agreement is the share of positions whose
likeliest token is float32's; free-running, the share of 64 greedy tokens before the
first that differs. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from quality_measure import BLOCK_SIZE, Measured, compare, measure

from tokenmill.workers.engine.kernels import ops
from tokenmill.workers.engine.model.calibration.files import checked_calibration
from tokenmill.workers.engine.model.calibration.result import calibration_facts
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.resolve import resolve_model

if TYPE_CHECKING:
    from tokenmill.workers.engine.kv.store import KVKind
    from tokenmill.workers.engine.model.calibration.tuning_choice import (
        CalibrationChoice,
    )
    from tokenmill.workers.engine.model.quantize import Weights

TEXT = Path(__file__).parent / "data" / "wikitext2-valid.txt"
PRECISIONS: dict[str, tuple[Weights, KVKind]] = {
    "bfloat16": ("bfloat16", "float32"),
    "int8-kv": ("float32", "int8"),
    "int8-weights": ("int8", "float32"),
    "int8": ("int8", "int8"),
    "int8-int4-kv": ("int8", "int4"),
    "nf4": ("nf4", "float32"),
}
"""By name: weights and KV."""
SLOW = ("bfloat16", "nf4")
"""Not made for this use on a CPU, hence fewer tokens."""


def tokenize(model: Path, text: Path, count: int) -> list[int]:
    """Returns the first `count` tokens of a text file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # A few characters a token: reading sixteen times that never falls short.
    content = text.read_text(encoding="utf-8")[: count * 16]
    ids: list[int] = tokenizer.encode(content, add_special_tokens=False).ids
    return ids[:count]


def run(
    path: Path,
    windows: list[list[int]],
    precision: tuple[Weights, KVKind],
    arguments: argparse.Namespace,
) -> Measured:
    """Loads the model in one precision and measures it."""
    weights, kv = precision
    runner = load_runner(
        path,
        weights=weights,
        kv=kv,
        block_size=BLOCK_SIZE,
        num_blocks=-(-max(map(len, windows)) // BLOCK_SIZE),
        threads=arguments.threads,
        device="cpu",
        calibration=calibration_of(path, arguments),
    )
    return measure(runner, windows, arguments.prompts)


def calibration_of(path: Path, arguments: argparse.Namespace) -> CalibrationChoice:
    """Returns the calibration that was asked for."""
    if arguments.uncalibrated:
        return None
    if arguments.calibration is not None:
        return checked_calibration(arguments.calibration, path)
    return "auto"


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--path", help="a directory or hub id instead of the name")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--slow-tokens", type=int, default=4_000, help=", ".join(SLOW))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--all", action="store_true", help="every precision")
    parser.add_argument(
        "--precisions", default="int8", help=f"of {', '.join(PRECISIONS)}"
    )
    parser.add_argument("--uncalibrated", action="store_true")
    parser.add_argument("--calibration", type=Path, help="a file instead of its own")
    parser.add_argument(
        "--exact", type=Path, help="float32's results (.npz): read, or written if new"
    )
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Returns whole windows of a text.

    Raises:
        SystemExit: Fewer than the two that an interval needs.
    """
    windows = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if len(windows) < 2:
        raise SystemExit(f"need at least two windows of {size} tokens, got {len(ids)}")
    return windows


def exact_results(
    path: Path, windows: list[list[int]], arguments: argparse.Namespace
) -> Measured:
    """Returns float32's results, from a file if one was kept."""
    kept: Path | None = arguments.exact
    if kept is not None and kept.is_file():
        found = Measured.load(kept)
        if found.losses.shape[1] != arguments.window - 1:
            raise SystemExit(f"{kept} is of other windows; remove it")
        return found
    found = run(path, windows, ("float32", "float32"), arguments)
    if kept is not None:
        found.save(kept)
    return found


def main() -> None:
    """Measures and prints one line of JSON."""
    # Standard output carries the one line of JSON.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    arguments = parse()
    path = resolve_model(arguments.model, arguments.path)
    windows = cut(tokenize(path, arguments.text, arguments.tokens), arguments.window)
    names = list(PRECISIONS) if arguments.all else arguments.precisions.split(",")
    if unknown := set(names) - PRECISIONS.keys():
        raise SystemExit(f"no precision {unknown}; expected {', '.join(PRECISIONS)}")
    started = time.perf_counter()
    exact = exact_results(path, windows, arguments)
    windows = windows[: len(exact.losses)]
    table = {}
    for name in names:
        limit = arguments.slow_tokens if name in SLOW else arguments.tokens
        part = windows[: max(2, limit // arguments.window)]
        tested = run(path, part, PRECISIONS[name], arguments)
        figures = compare(exact.head(len(part)), tested)
        table[name] = {
            "tokens": tested.losses.size,
            **{key: round(value, 4) for key, value in figures.items()},
        }
        print(f"{name}: {table[name]}", file=sys.stderr, flush=True)
    report = {
        "bench": "quality",
        "model": arguments.model,
        "kernels": ops.backend_report()["backend"],
        "calibration": None if arguments.uncalibrated else calibration_facts(path),
        "text": arguments.text.name,
        "window": arguments.window,
        "prompts": arguments.prompts,
        "precisions": table,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
