"""What adapters cost a step: plain rows, rows of one adapter, rows of several.

Each figure is the median time of the same step (all rows decode, or all are prefilled)
on one loaded model: without adapters, with one on all rows, and with one for every
part of the rows; then the time to load an adapter. The plain step of a model that has
adapters loaded is the baseline of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import adapter_digest
from tokenmill.workers.engine.adapters.serving import serve_adapters
from tokenmill.workers.engine.adapters.targets import base_linears
from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.resolve import resolve_model

BLOCK = 8


def write_adapter(base: Path, directory: Path, rank: int) -> Path:
    """Writes a random adapter on all linear layers."""
    directory.mkdir()
    tensors = {}
    for module, (rows, columns) in base_linears(base).shapes.items():
        stem = f"base_model.model.{module}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns) * 0.01
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank) * 0.01
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def step(rows: int, context: int, new: int, keys: tuple[str, ...]) -> StepBatch:
    """Sequences of `context` tokens of which the last `new` run; keys go round."""
    blocks = -(-context // BLOCK)
    return StepBatch(
        token_ids=np.random.default_rng(0).integers(0, 256, rows * new),
        positions=np.tile(np.arange(context - new, context), rows),
        slices=tuple(
            SequenceSlice(
                query_start=index * new,
                query_length=new,
                context_length=context,
                block_table=tuple(range(index * blocks, (index + 1) * blocks)),
                prompt_length=context,
            )
            for index in range(rows)
        ),
        logit_rows=np.arange(new - 1, rows * new, new),
        adapters=tuple(keys[index % len(keys)] for index in range(rows))
        if keys
        else (),
    )


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Returns the median time after one call that does not count."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return round(statistics.median(times), 3)


def load_all(
    cache: AdapterCache, base: Path, root: Path, count: int, rank: int
) -> tuple[tuple[str, ...], list[float]]:
    """Loads adapters; returns their keys and the milliseconds each took."""
    keys, times = [], []
    for index in range(count):
        path = write_adapter(base, root / str(index), rank)
        digest = adapter_digest(path)
        began = time.perf_counter()
        cache.load(str(index), path, digest)
        times.append((time.perf_counter() - began) * 1e3)
        keys.append(str(index))
    return tuple(keys), times


def main() -> None:
    """Measures and prints, one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prefill", type=int, default=32, help="new tokens a row")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    base = resolve_model(options.model)
    context = 64 + options.prefill
    runner = load_runner(
        base,
        weights=options.weights,
        kv="float32" if options.weights == "float32" else "int8",
        block_size=BLOCK,
        num_blocks=options.rows * -(-context // BLOCK),
        threads=options.threads,
    )
    cache = serve_adapters(runner, max_bytes=1 << 40)
    figures: dict[str, object] = {**vars(options)}
    with tempfile.TemporaryDirectory() as root:
        keys, times = load_all(cache, base, Path(root), options.adapters, options.rank)
    figures["load_ms"] = round(statistics.median(times), 1)
    figures["adapter_mib"] = round(cache.get(keys[0]).nbytes / 2**20, 2)
    for kind, new in (("decode", 1), ("prefill", options.prefill)):
        for name, used in (("plain", ()), ("one", keys[:1]), ("all", keys)):
            batch = step(options.rows, context, new, used)
            taken = median_ms(lambda batch=batch: runner.run(batch), options.repeats)
            figures[f"{kind}_{name}_ms"] = taken
            print(f"{kind:8} {name:6} {taken:8.2f} ms")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
