"""Every GPU kernel against the reference, and rows against their batch mates."""

import time
from collections.abc import Iterator

import torch
from gpu_cases import step, store, vectors
from gpu_device import device_of

from tokenmill.workers.engine.kernels import reference
from tokenmill.workers.engine.kernels.layout import KVKind, StepLayout
from tokenmill.workers.engine.kernels.triton.layout import store_to_device, to_device
from tokenmill.workers.engine.kernels.triton.ops import TritonOps
from tokenmill.workers.engine.kernels.triton.quantize import quantize_rows
from tokenmill.workers.engine.model.gpu.linear import CANDIDATES, torch_matmul

Row = dict[str, object]
ATTENTION: list[tuple[int, int, int, KVKind, torch.dtype]] = [
    (64, 3, 3, "int8", torch.float16),
    (80, 2, 4, "int8", torch.bfloat16),
    (96, 4, 1, "int8", torch.float16),
    (128, 8, 4, "int8", torch.bfloat16),
    (128, 8, 4, "int4", torch.bfloat16),
    (64, 3, 3, "int4", torch.float32),
    (128, 2, 7, "float32", torch.float32),
]
"""Head size, KV heads, query heads of each, store, type of the queries."""
SMOKE = [ATTENTION[0], ATTENTION[5]]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def stage(facts: Row, deadline: float) -> Iterator[Row]:
    """Yields a row per kernel and shape; checks left when time is up are named."""
    device, smoke = device_of(facts), bool(facts["smoke"])
    torch.manual_seed(0)
    checks = [_rows, _linears, _products, _attention, _invariance]
    for check in checks:
        for row in check(device, smoke):
            yield row
            if time.monotonic() > deadline - 5:
                yield {"what": check.__name__.strip("_"), "failed": "out of time"}
                return


def _bits(what: str, actual: torch.Tensor, expected: torch.Tensor) -> Row:
    """A row that asks for the very same values."""
    same = torch.equal(actual.cpu().to(expected.dtype), expected)
    worst = (actual.cpu().double() - expected.double()).abs().max()
    return {"what": what, "agrees": same, "error": float(worst), "allowed": 0.0}


def _near(
    what: str, actual: torch.Tensor, expected: torch.Tensor, allowed: float
) -> Row:
    worst = float((actual.cpu().double() - expected.double()).abs().max())
    return {
        "what": what,
        "agrees": worst <= allowed,
        "error": worst,
        "allowed": allowed,
    }


def _rows(device: torch.device, smoke: bool) -> Iterator[Row]:
    x = torch.randn(3 if smoke else 64, 200 if smoke else 11008)
    x[0, 3] = 50.0
    for kind in ("int8", "int16"):
        values, _ = quantize_rows(x.to(device), kind)
        yield _bits(
            f"quantize_rows {kind}", values, reference.quantize_rows(x, kind)[0]
        )


def _linears(device: torch.device, smoke: bool) -> Iterator[Row]:
    ops = TritonOps(device)
    shapes = [(3, 96, 40)] if smoke else [(1, 4096, 4096), (33, 4096, 11008)]
    for rows, inner, outer in shapes:
        x, w = torch.randn(rows, inner), torch.randn(outer, inner)
        for kind in ("int8", "int16"):
            packed = ops.quantize_weight(w, activations=kind)
            expected = reference.linear(
                x, reference.quantize_weight(w, activations=kind)
            )
            actual = ops.linear(x.to(device), packed)
            yield _bits(f"linear {kind} {rows}x{inner}x{outer}", actual, expected)


def _products(device: torch.device, smoke: bool) -> Iterator[Row]:
    inner, outer = (64, 32) if smoke else (4096, 11008)
    for rows in (1, 40):
        a, b = (
            torch.randint(-127, 128, (n, inner), dtype=torch.int8)
            for n in (rows, outer)
        )
        expected = (a.double() @ b.double().T).to(torch.int32)
        for name, product in CANDIDATES.items():
            try:
                actual = product(a.to(device), b.to(device))
            except (RuntimeError, NotImplementedError) as error:
                # Measuring at start leaves such a library out.
                yield {
                    "what": f"product {name} {rows} rows",
                    "refused": str(error)[:80],
                }
                continue
            yield _bits(f"product {name} {rows} rows", actual, expected)


def _attention(device: torch.device, smoke: bool) -> Iterator[Row]:
    ops = TritonOps(device)
    for dim, kv_heads, group, kind, dtype in SMOKE if smoke else ATTENTION:
        context = 33 if smoke else 1100
        for query in (1, 9):
            layout = step(3, context, query, seed=dim)
            host = store(layout, kv_heads, dim, kind)
            whole = step(3, context, context, seed=dim)
            k, v = (
                vectors(3 * context, kv_heads, dim, torch.device("cpu"), torch.float32)
                for _ in range(2)
            )
            written = store_to_device(host, device)
            ops.kv_write(k.to(device), v.to(device), written, to_device(whole, device))
            reference.kv_write(k, v, host, whole)
            name = f"{kind} {dim} {kv_heads}x{group} {str(dtype)[6:]}"
            if query == 1:
                yield _bits(f"kv_write {name}", written.k, host.k)
            q = vectors(3 * query, kv_heads * group, dim, torch.device("cpu"), dtype)
            actual = ops.paged_attention(
                q.to(device), written, to_device(layout, device), scale=dim**-0.5
            )
            expected = reference.paged_attention(
                q.float(), host, layout, scale=dim**-0.5
            )
            kernel = "decode" if query == 1 else "prefill"
            yield _near(f"{kernel} {name}", actual, expected, TOLERANCE[dtype])


def _invariance(device: torch.device, smoke: bool) -> Iterator[Row]:
    """Rows alone against rows in a batch, and decode against prefill."""
    if smoke:
        return  # the interpreter's products depend on a row's place
    ops = TritonOps(device, int8_matmul=torch_matmul)
    x = torch.randn(40, 4096, device=device, dtype=torch.bfloat16)
    for kind in ("int8", "int16"):
        weight = ops.quantize_weight(torch.randn(4096, 4096), activations=kind)
        together, alone = ops.linear(x, weight), ops.linear(x[:1], weight)
        yield _bits(f"linear {kind} alone", alone[0], together[0].cpu())
    for kind in ("int8", "int4"):
        whole = step(1, 600, 600)
        layer = store_to_device(store(whole, 8, 128, kind), device)
        k, v = (vectors(600, 8, 128, device, torch.bfloat16) for _ in range(2))
        q = vectors(600, 32, 128, device, torch.bfloat16)
        placed = to_device(whole, device)
        ops.kv_write(k, v, layer, placed)
        prefill = ops.paged_attention(q, layer, placed, scale=0.1)
        for last in (1, 32, 33, 512, 513, 600):
            one = to_device(_at(whole, last), device)
            decode = ops.paged_attention(q[last - 1 : last], layer, one, scale=0.1)
            yield _bits(
                f"decode = prefill {kind} {last}", decode[0], prefill[last - 1].cpu()
            )


def _at(whole: StepLayout, last: int) -> StepLayout:
    """The layout of a decode of one sequence's token `last`."""
    return StepLayout(
        whole.slot_mapping[last - 1 : last],
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([last], dtype=torch.int32),
        whole.block_table,
        whole.positions[last - 1 : last],
    )
