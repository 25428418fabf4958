"""Perplexity of a quantized engine against exact float32, on the same tokens.

    python bench/quality.py --tokens 20000

Both run through the engine's own model runner: packed steps, chunked prefill, paged KV.
The text is cut into windows; in each, every token is predicted from those before it.
The difference is paired: per window, then a 95 % interval over windows. Prints one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.kernels import ops
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.resolve import resolve_model

if TYPE_CHECKING:
    from tokenmill.workers.engine.kv.store import KVKind
    from tokenmill.workers.engine.model.quantize import Weights
    from tokenmill.workers.engine.model.runner import TransformersRunner

TEXT = Path(__file__).parent / "data" / "wikitext2-valid.txt"
CHUNK = 256
"""Tokens a step; the engine's chunk borders do not change results."""
BLOCK_SIZE = 8
T_95 = 1.96


def tokenize(model: Path, text: Path, count: int) -> list[int]:
    """Returns the first `count` tokens of a text file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # A few characters a token: reading four times that never falls short.
    content = text.read_text(encoding="utf-8")[: count * 16]
    ids: list[int] = tokenizer.encode(content, add_special_tokens=False).ids
    return ids[:count]


def window_steps(window: list[int]) -> Iterator[StepBatch]:
    """Yields the prefill steps of one window, logits wanted for every row."""
    blocks = tuple(range(-(-len(window) // BLOCK_SIZE)))
    for start in range(0, len(window), CHUNK):
        part = window[start : start + CHUNK]
        yield StepBatch(
            token_ids=np.array(part, dtype=np.int64),
            positions=np.arange(start, start + len(part), dtype=np.int64),
            slices=(SequenceSlice(0, len(part), start + len(part), blocks),),
            logit_rows=np.arange(len(part), dtype=np.int64),
        )


def window_losses(runner: TransformersRunner, window: list[int]) -> np.ndarray:
    """Returns the negative log likelihood of each token but the first, float64."""
    targets = torch.tensor(window[1:])
    losses = []
    done = 0
    for step in window_steps(window):
        logits = runner.run(step)
        wanted = targets[done : done + len(logits)]
        rows = logits[: len(wanted)].double()
        chosen = rows.gather(1, wanted[:, None])[:, 0]
        losses.append((torch.logsumexp(rows, dim=-1) - chosen).numpy())
        done += len(wanted)
    return np.concatenate(losses)


def losses(
    path: Path,
    windows: list[list[int]],
    weights: Weights,
    kv: KVKind,
    threads: int | None,
) -> list[np.ndarray]:
    """Loads the model in one precision and returns each window's losses."""
    runner = load_runner(
        path,
        weights=weights,
        kv=kv,
        block_size=BLOCK_SIZE,
        num_blocks=-(-max(map(len, windows)) // BLOCK_SIZE),
        threads=threads,
    )
    return [window_losses(runner, window) for window in windows]


def compare(exact: list[np.ndarray], tested: list[np.ndarray]) -> dict[str, float]:
    """Returns both perplexities and the paired change in percent with its interval."""
    differences = np.array(
        [float((b - a).mean()) for a, b in zip(exact, tested, strict=True)]
    )
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    low, high = mean - T_95 * error, mean + T_95 * error
    return {
        "perplexity_float32": math.exp(float(np.concatenate(exact).mean())),
        "perplexity": math.exp(float(np.concatenate(tested).mean())),
        "change_percent": 100 * math.expm1(mean),
        "low_95_percent": 100 * math.expm1(low),
        "high_95_percent": 100 * math.expm1(high),
    }


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--path", help="a directory or hub id instead of the name")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--weights", default="int8", choices=("int8", "nf4", "float32"))
    parser.add_argument("--kv", default="int8", choices=("int8", "float32"))
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def main() -> None:
    """Measures and prints one line of JSON."""
    # Standard output carries the one line of JSON.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    arguments = parse()
    path = resolve_model(arguments.model, arguments.path)
    ids = tokenize(path, arguments.text, arguments.tokens)
    size = arguments.window
    windows = [ids[at : at + size] for at in range(0, len(ids), size)]
    windows = [window for window in windows if len(window) == size]
    if len(windows) < 2:
        raise SystemExit(f"need at least two windows of {size} tokens, got {len(ids)}")
    started = time.perf_counter()
    exact = losses(path, windows, "float32", "float32", arguments.threads)
    tested = losses(path, windows, arguments.weights, arguments.kv, arguments.threads)
    report: dict[str, object] = {
        "bench": "quality",
        "model": arguments.model,
        "weights": arguments.weights,
        "kv": arguments.kv,
        "kernels": ops.backend_report()["backend"],
        "text": arguments.text.name,
        "tokens": len(windows) * (size - 1),
        "window": size,
        **{name: round(x, 4) for name, x in compare(exact, tested).items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
