"""Times of the GPU kernels against their floors.

A floor is the larger of two times: the bytes that must move over the memory's rate, and
the operations over the rate of the units that do them. Linear layers are also timed
beside the same product in float16.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_cases import step, store, stored_bytes, vectors
from gpu_device import Clock, device_of

from tokenmill.workers.engine.kernels.layout import KVKind
from tokenmill.workers.engine.kernels.triton.layout import empty_store_like, to_device
from tokenmill.workers.engine.kernels.triton.ops import Int8Matmul, TritonOps
from tokenmill.workers.engine.kernels.triton.quantize import quantize_rows
from tokenmill.workers.engine.model.gpu.device_linear import Place
from tokenmill.workers.engine.model.gpu.int8 import DeviceInt8Linear
from tokenmill.workers.engine.model.gpu.linear import CANDIDATES

Row = dict[str, object]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""The attention of a llama with 8 billion parameters."""
STEPS = [(1, 4096, 1), (16, 1024, 1), (64, 4096, 1), (1, 2048, 2048), (4, 4096, 512)]
"""Sequences, tokens of each, tokens of each in the step."""
LINEARS = [(4096, 4096), (14336, 4096), (4096, 14336)]
"""Outputs and inputs of its layers."""
OUTLIERS = 16


class Floors:
    """Least times on a device.

    Args:
        facts: What the stage `device` found.
    """

    def __init__(self, facts: Row) -> None:
        self._bytes = float(str(facts["gb_per_s"])) * 1e6
        self._rates = {
            "half": float(str(facts["half_tera"])) * 1e9,
            "tf32": float(str(facts["half_tera"])) * 1e9 / 2,
            "int8": float(str(facts["int8_tera"])) * 1e9,
        }

    def milliseconds(self, moved: float, operations: float, unit: str) -> float:
        """Returns the time below which no kernel can get."""
        return max(moved / self._bytes, operations / self._rates[unit])


def stage(facts: Row, deadline: float) -> Iterator[Row]:
    """Yields a row per kernel and shape, until time is up."""
    device, smoke = device_of(facts), bool(facts["smoke"])
    clock, floors = Clock(device), Floors(facts)
    torch.manual_seed(0)
    for rows in (_attention, _linears):
        for row in rows(device, smoke, clock, floors):
            yield row
            if time.monotonic() > deadline - 3:
                yield {"what": rows.__name__.strip("_"), "failed": "out of time"}
                return


def _row(what: str, clock: Clock, run: Callable[[], object], floor: float) -> Row:
    took = clock.milliseconds(run)
    return {"what": what, "ms": took, "floor_ms": floor, "of_floor": floor / took}


def _attention(
    device: torch.device, smoke: bool, clock: Clock, floors: Floors
) -> Iterator[Row]:
    """Decode, prefill and the quantizing write over INT8 and INT4 blocks."""
    ops = TritonOps(device)
    kinds: list[KVKind] = ["int8", "int4"]
    heads, kv_heads, dim = (2, 1, 16) if smoke else (HEADS, KV_HEADS, HEAD_DIM)
    dtype = torch.float32 if smoke else torch.bfloat16
    for sequences, context, query in [(2, 20, 1), (1, 20, 9)] if smoke else STEPS:
        host = step(sequences, context, query)
        layout, tokens = to_device(host, device), sequences * query
        q = vectors(tokens, heads, dim, device, dtype)
        k, v = (vectors(tokens, kv_heads, dim, device, dtype) for _ in range(2))
        for kind in kinds:
            layer = empty_store_like(store(host, kv_heads, dim, kind), device)
            shape = f"{kind} {sequences} x {query} of {context}"
            read = stored_bytes(layer, sequences * context)
            seen = sequences * query * (context - (query - 1) / 2)
            yield _row(
                f"kv_write {shape}",
                clock,
                partial(ops.kv_write, k, v, layer, layout),
                floors.milliseconds(
                    k.nbytes + v.nbytes + stored_bytes(layer, tokens), 0, "half"
                ),
            )
            yield _row(
                f"{'decode' if query == 1 else 'prefill'} {shape}",
                clock,
                partial(ops.paged_attention, q, layer, layout, scale=dim**-0.5),
                floors.milliseconds(
                    read + 2 * q.nbytes,
                    4 * seen * heads * dim,
                    "half" if smoke else "tf32",
                ),
            )


def _linears(
    device: torch.device, smoke: bool, clock: Clock, floors: Floors
) -> Iterator[Row]:
    """Row quantization, INT8 layers by library, 16-bit rows, and float16."""
    dtype = torch.float32 if smoke else torch.bfloat16
    ops = TritonOps(device)
    for outputs, inputs in [(32, 64)] if smoke else LINEARS:
        weight = torch.randn(outputs, inputs, device=device)
        plain = weight.to(dtype)
        wide = ops.quantize_weight(weight)
        layers = {
            name: _int8(weight, matmul, dtype)
            for name, matmul in CANDIDATES.items()
            if not (smoke and name == "bitsandbytes")  # it takes seconds to import
        }
        for batch in (2,) if smoke else (1, 16, 64, 512):
            x = torch.randn(batch, inputs, device=device, dtype=dtype)
            shape = f"{batch} x {inputs} -> {outputs}"
            moved = weight.numel() + 2 * x.nbytes
            products = 2 * batch * weight.numel()
            yield _row(
                f"quantize_rows {batch} x {inputs}",
                clock,
                partial(quantize_rows, x, "int8"),
                floors.milliseconds(x.nbytes + x.numel(), 0, "half"),
            )
            int8 = floors.milliseconds(moved, products, "int8")
            for name, layer in layers.items():
                try:
                    yield _row(f"int8 {name} {shape}", clock, partial(layer, x), int8)
                except (RuntimeError, NotImplementedError) as error:
                    yield {"what": f"int8 {name} {shape}", "refused": str(error)[:80]}
            yield _row(
                f"int16 rows {shape}",
                clock,
                partial(ops.linear, x, wide),
                floors.milliseconds(moved, 2 * products, "int8"),
            )
            yield _row(
                f"float16 {shape}",
                clock,
                partial(torch.nn.functional.linear, x, plain),
                floors.milliseconds(plain.nbytes + 2 * x.nbytes, products, "half"),
            )


def _int8(
    weight: torch.Tensor, matmul: Int8Matmul, dtype: torch.dtype
) -> DeviceInt8Linear:
    place = Place(weight.device, weight.device, dtype)
    layer = DeviceInt8Linear(
        weight.shape[1],
        weight.shape[0],
        place,
        outlier_columns=range(OUTLIERS),
        matmul=matmul,
    )
    layer.fill(weight)
    return layer
