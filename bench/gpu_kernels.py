"""Times the GPU kernels on this machine's device and prints a table.

    python bench/gpu_kernels.py

Attention and KV writes are compared with the bytes that they must move, linear layers
with the same product in float16. The last line is one JSON object.
"""

import json
import sys
from collections.abc import Callable
from functools import partial

import torch

from tokenmill.workers.engine.kernels.layout import KVLayer, StepLayout
from tokenmill.workers.engine.kernels.triton.layout import store_to_device, to_device
from tokenmill.workers.engine.kernels.triton.ops import TritonOps
from tokenmill.workers.engine.model.gpu_linear import CANDIDATES, Int8Linear

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 8
"""The attention of an 8-billion-parameter llama."""
LINEARS = [(4096, 4096), (14336, 4096), (4096, 14336)]
"""Its linear layers as (outputs, inputs)."""
RUNS = 20


def milliseconds(run: Callable[[], object]) -> float:
    """Median device time of one call, after three that compile and warm up."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(RUNS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[RUNS // 2]


def step(sequences: int, context: int, query: int) -> StepLayout:
    """A step of equal sequences whose blocks are scattered over the pool."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(sequences * blocks, dtype=torch.int32).view(sequences, -1)
    positions = torch.arange(context - query, context)
    slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE
    return StepLayout(
        (slots + positions % BLOCK_SIZE).reshape(-1),
        torch.arange(0, (sequences + 1) * query, query, dtype=torch.int32),
        torch.full((sequences,), context, dtype=torch.int32),
        table,
        positions.repeat(sequences),
    )


def attention(device: torch.device) -> list[dict[str, object]]:
    """Decode and prefill over INT8 blocks, and the quantizing write."""
    ops = TritonOps(device)
    rows: list[dict[str, object]] = []
    for sequences, context, query in [
        (1, 4096, 1),
        (16, 1024, 1),
        (64, 4096, 1),
        (1, 2048, 2048),
        (4, 4096, 512),
    ]:
        layout = to_device(step(sequences, context, query), device)
        blocks = layout.block_table.numel()
        layer = store_to_device(
            KVLayer.allocate(blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, int8=True), device
        )
        tokens, half = sequences * query, torch.float16
        q = torch.randn(tokens, HEADS, HEAD_DIM, device=device, dtype=half)
        k, v = (
            torch.randn(tokens, KV_HEADS, HEAD_DIM, device=device, dtype=half)
            for _ in range(2)
        )
        write = milliseconds(partial(ops.kv_write, k, v, layer, layout))
        attend = milliseconds(
            partial(ops.paged_attention, q, layer, layout, scale=HEAD_DIM**-0.5)
        )
        stored = sequences * context * KV_HEADS * (HEAD_DIM + 4) * 2
        rows.append(
            {
                "kernel": "decode" if query == 1 else "prefill",
                "shape": f"{sequences} x {query} of {context}",
                "ms": attend,
                "write_ms": write,
                "stored_gb_per_s": stored / attend / 1e6,
            }
        )
    return rows


def linears(device: torch.device) -> list[dict[str, object]]:
    """INT8 layers by library against float16, at several batch sizes."""
    rows: list[dict[str, object]] = []
    for outputs, inputs in LINEARS:
        weight = torch.randn(outputs, inputs, device=device)
        half = weight.half()
        ops = TritonOps(device)
        wide = ops.quantize_weight(weight)
        layers = {
            name: Int8Linear(weight, outlier_columns=range(16), matmul=matmul)
            for name, matmul in CANDIDATES.items()
        }
        for batch in (1, 16, 64, 512):
            x = torch.randn(batch, inputs, device=device, dtype=torch.float16)
            times: dict[str, object] = {
                name: milliseconds(partial(layer, x)) for name, layer in layers.items()
            }
            times["int16 rows"] = milliseconds(partial(ops.linear, x, wide))
            times["float16"] = milliseconds(
                partial(torch.nn.functional.linear, x, half)
            )
            rows.append({"shape": f"{batch} x {inputs} -> {outputs}", **times})
    return rows


def show(title: str, rows: list[dict[str, object]]) -> None:
    """Prints rows as a table."""
    print(f"\n{title}\n" + "  ".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        cells = (
            f"{value:.4f}" if isinstance(value, float) else str(value)
            for value in row.values()
        )
        print("  ".join(f"{cell:>18}" for cell in cells))


def main() -> int:
    """Runs all measurements; exits with 3 where there is no CUDA device."""
    if not torch.cuda.is_available():
        print("error: no CUDA device; this benchmark needs one", file=sys.stderr)
        return 3
    device = torch.device("cuda")
    attended, multiplied = attention(device), linears(device)
    show("attention over INT8 blocks", attended)
    show("linear layers, milliseconds", multiplied)
    name = torch.cuda.get_device_name(device)
    print(json.dumps({"device": name, "attention": attended, "linear": multiplied}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
