"""CPU kernels against PyTorch: multiply-adds per second and attention times.

    python bench/kernels.py [--threads 2] [--quick]

Each figure is the best of several runs, so a busy machine hurts less; per-core figures
count the CPU time of one thread. The last line is the whole result as JSON.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable

import torch

from tokenmill.workers.engine.kernels import ops
from tokenmill.workers.engine.kernels.layout import KVKind, KVLayer, StepLayout

SHAPES = {
    "qkv": (960, 576),
    "output": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
ROWS = (1, 4, 8, 16, 32, 128, 512)
LAYERS = 30
"""SmolLM2-135M: the model whose shapes these are."""
HEAD_ROWS = 32
"""More logit rows than this do not occur in a step."""


def best_seconds(
    run: Callable[[], object], clock: Callable[[], float], repeats: int
) -> float:
    """Returns the shortest time of one call."""
    run()
    started = clock()
    run()
    once = max(clock() - started, 1e-7)
    inner = max(1, int(0.004 / once))
    best = float("inf")
    for _ in range(repeats):
        started = clock()
        for _ in range(inner):
            run()
        best = min(best, (clock() - started) / inner)
    return best


def linears(n: int, k: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns every implementation of one layer, by name."""
    w = torch.randn(n, k) * k**-0.5
    int16 = ops.quantize_weight(w, activations="int16")
    int8 = ops.quantize_weight(w, activations="int8")
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "int16": lambda x: ops.linear(x, int16),
        "int8": lambda x: ops.linear(x, int8),
        "torch fp32": lambda x: torch.nn.functional.linear(x, w),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own quantized tensors are on leave
        scales, zeros = w.abs().amax(1).double() / 127, torch.zeros(n).long()
        try:
            packed = torch.ops.quantized.linear_prepack(
                torch.quantize_per_channel(w, scales, zeros, 0, torch.qint8), None
            )
        except RuntimeError as error:
            print(f"torch int8 left out: {error}")
            return made
    made["torch int8"] = lambda x: torch.ops.quantized.linear_dynamic(x, packed)
    return made


def bench_linear(threads: int, repeats: int) -> list[dict[str, object]]:
    """Measures all shapes and row counts; one dict per line of the table."""
    table: list[dict[str, object]] = []
    for name, (n, k) in SHAPES.items():
        made = linears(n, k)
        for rows in ROWS:
            if name == "head" and rows > HEAD_ROWS:
                continue
            x = torch.randn(rows, k)
            line: dict[str, object] = {"shape": name, "rows": rows}
            for label, run in made.items():
                for count, clock, suffix in (
                    (1, time.thread_time, "core"),
                    (threads, time.perf_counter, "all"),
                ):
                    ops.set_num_threads(count, torch_threads=count)
                    seconds = best_seconds(lambda run=run, x=x: run(x), clock, repeats)
                    line[f"{label} {suffix}"] = round(rows * n * k / seconds / 1e9, 1)
            table.append(line)
            print(
                "  ".join(f"{key} {value}" for key, value in line.items()), flush=True
            )
    return table


def one_sequence_each(lengths: list[tuple[int, int]], block_size: int) -> StepLayout:
    """Lays sequences (query, context) out in consecutive blocks."""
    slots: list[int] = []
    positions: list[int] = []
    tables: list[list[int]] = []
    starts, block = [0], 0
    for query, context in lengths:
        count = -(-context // block_size)
        tables.append(list(range(block, block + count)))
        places = range(context - query, context)
        slots += [block * block_size + place for place in places]
        positions += places
        starts.append(starts[-1] + query)
        block += count
    width = max(map(len, tables))
    return StepLayout(
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for _, context in lengths], dtype=torch.int32),
        torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        torch.tensor(positions),
    )


def bench_attention(threads: int, repeats: int) -> dict[str, float]:
    """Measures one layer of 9 query and 3 KV heads of 64, in milliseconds."""
    times: dict[str, float] = {}
    cases = {
        "decode 16 x 200": [(1, 200)] * 16,
        "decode 1 x 8192": [(1, 8192)],
        "prefill 512": [(512, 512)],
        "chunk 512 at 8192": [(512, 8192)],
    }
    kinds: tuple[KVKind, ...] = ("int8", "int4")
    for name, lengths in cases.items():
        for kind in kinds:
            run = attention_call(lengths, kind)
            for count, clock, suffix in (
                (1, time.thread_time, "core"),
                (threads, time.perf_counter, "all"),
            ):
                ops.set_num_threads(count)
                seconds = best_seconds(run, clock, repeats)
                times[f"{name} {kind} {suffix}"] = round(seconds * 1e3, 3)
    print("attention, ms a layer:", times, flush=True)
    return times


def attention_call(
    lengths: list[tuple[int, int]], kind: KVKind
) -> Callable[[], torch.Tensor]:
    """Returns one layer's attention over sequences (query, context), ready to run."""
    whole = one_sequence_each([(context, context) for _, context in lengths], 8)
    layout = one_sequence_each(lengths, 8)
    blocks = int(whole.block_table.max()) + 1
    store = KVLayer.allocate(blocks, 3, 8, 64, kind=kind)
    k, v = torch.randn(2, len(whole.positions), 3, 64)
    ops.kv_write(k, v, store, whole)
    q = torch.randn(len(layout.positions), 9, 64)
    return lambda: ops.paged_attention(q, store, layout, scale=0.125)


def model_milliseconds(table: list[dict[str, object]]) -> dict[str, float]:
    """Returns the time of all of a step's linear layers, head included, per rows."""
    totals: dict[str, float] = {}
    for rows in (r for r in ROWS if r <= HEAD_ROWS):
        for label in ("int16 all", "int8 all"):
            seconds = 0.0
            for line in table:
                if line["rows"] == rows:
                    n, k = SHAPES[str(line["shape"])]
                    times = 1 if line["shape"] == "head" else LAYERS
                    seconds += times * rows * n * k / float(str(line[label])) / 1e9
            totals[f"{label} {rows} rows"] = round(seconds * 1e3, 1)
    print("all linear layers of SmolLM2-135M, ms:", totals, flush=True)
    return totals


def main() -> None:
    """Runs everything and prints one JSON line at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    repeats = 3 if arguments.quick else 9
    report = ops.backend_report()
    print(report)
    table = bench_linear(arguments.threads, repeats)
    result = {
        "bench": "kernels",
        **report,
        "threads": arguments.threads,
        "unit": "giga multiply-adds per second",
        "linear": table,
        "model_ms": model_milliseconds(table),
        "attention_ms": bench_attention(arguments.threads, repeats),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
