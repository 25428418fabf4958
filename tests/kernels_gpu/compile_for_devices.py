"""Compiles every kernel to machine code for the devices named, without having one.

Prints a JSON object per kernel: its name, the device, its shared memory in bytes, the
layouts of its matrix products and whether it has fused multiply-adds of float32.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenmill.workers.engine.kernels.triton import (
    decode,
    kv_write,
    linear,
    prefill,
    quantize,
)

POINTERS = {
    "x_ptr": "*fp16", "out_ptr": "*fp16", "q_ptr": "*fp16", "k_ptr": "*i8",
    "v_ptr": "*i8", "slot_ptr": "*i64", "k_out": "*i8", "v_out": "*i8",
    "query_start_ptr": "*i32", "context_ptr": "*i32", "table_ptr": "*i32",
    "outlier_ptr": "*i64",
}  # fmt: skip
"""Types of pointer arguments that are not float32."""
FLOATS = {"scale", "softcap", "levels"}

ATTENTION: dict[str, Any] = {
    "GROUP": 3, "SPLIT": 512, "ROWS": 32, "TILE": 32, "D": 48, "D_PADDED": 64,
    "KV_HEADS": 3, "BLOCK_SIZE": 8, "BITS": 8, "WINDOW": True, "ALIBI": True,
    "SOFTCAP": True, "PRECISION": "tf32",
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "D": 16, "D_PADDED": 16, "BITS": 32, "WINDOW": False, "ALIBI": False,
    "SOFTCAP": False, "PRECISION": "ieee",
}  # fmt: skip
TILES = {"ROWS": 64, "COLUMNS": 64, "INNER": 64, "LENGTH": 512}
INT4 = {
    "k_ptr": "*u8", "v_ptr": "*u8", "k_scale_ptr": "*bf16", "v_scale_ptr": "*bf16",
    "k_out": "*u8", "v_out": "*u8",
}  # fmt: skip
INT8 = {"x_ptr": "*i8", "w_ptr": "*i8"}

KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (quantize._quantize_rows_kernel, {"out_ptr": "*i16"}, {"BLOCK": 1024}),
    (
        kv_write._kv_write_kernel,
        {"k_ptr": "*fp16", "v_ptr": "*fp16"},
        {"HEADS": 3, "D": 80, "BLOCK_SIZE": 8, "HEADS_PADDED": 4, "D_PADDED": 128,
         "BITS": 8},
    ),
    (
        kv_write._kv_write_kernel,
        {**INT4, "k_ptr": "*bf16", "v_ptr": "*bf16", "k_scale": "*bf16",
         "v_scale": "*bf16"},
        {"HEADS": 3, "D": 80, "BLOCK_SIZE": 8, "HEADS_PADDED": 4, "D_PADDED": 128,
         "BITS": 4},
    ),
    (decode.decode_kernel, {}, ATTENTION),
    (decode.decode_kernel, INT4, {**ATTENTION, "BITS": 4}),
    (prefill.prefill_kernel, INT4,
     {**ATTENTION, "BITS": 4, "QUERIES": 10, "SEQUENCES_PADDED": 16}),
    (prefill.prefill_kernel, {}, {**ATTENTION, "QUERIES": 10, "SEQUENCES_PADDED": 16}),
    (
        decode.decode_kernel,
        {"q_ptr": "*fp32", "k_ptr": "*fp32", "v_ptr": "*fp32"},
        {**ATTENTION, **PLAIN},
    ),
    (
        prefill.prefill_kernel,
        {"q_ptr": "*fp32", "out_ptr": "*fp32", "k_ptr": "*fp32", "v_ptr": "*fp32"},
        {**ATTENTION, **PLAIN, "QUERIES": 10, "SEQUENCES_PADDED": 1},
    ),
    (
        decode.reduce_kernel,
        {},
        {"SPLIT": 512, "HEADS": 9, "D": 48, "D_PADDED": 64, "WINDOW": True},
    ),
    (
        linear._linear_kernel,
        {**INT8, "x_ptr": "*i16"},
        {**TILES, "WIDE": True, "BIAS": True},
    ),
    (linear._matmul_kernel, {**INT8, "out_ptr": "*i32"}, TILES),
    (
        linear._rescale_kernel,
        {"acc_ptr": "*i32"},
        {"BLOCK": 1024, "OUTLIERS": 16, "BIAS": True},
    ),
]  # fmt: skip


def argument_type(name: str, special: dict[str, str]) -> str:
    """The type of a run-time argument, from its name."""
    if name in special:
        return special[name]
    if name.endswith(("_ptr", "_out")) or name in ("k_scale", "v_scale"):
        return POINTERS.get(name, "*fp32")
    return "fp32" if name in FLOATS else "i32"


def compile_one(
    kernel: Any, special: dict[str, str], constants: dict[str, Any], capability: int
) -> dict[str, object]:
    """Compiles a kernel and returns what the tests look at."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else argument_type(name, special)
        for name in names
    }
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False, "num_warps": 4},
    )
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "precision": constants.get("PRECISION"),
        "bits": constants.get("BITS"),
        "capability": capability,
        "bytes": len(compiled.asm["cubin"]),
        "shared": compiled.metadata.shared,
        "layouts": sorted(
            set(re.findall(r"nvidia_mma<\{[^}]*\}", compiled.asm["ttgir"]))
        ),
        "products": sorted(set(re.findall(r"mma(?:\.sync|_async)[.\w]*", ptx))),
        "fused": bool(re.search(r"\bfma\.rn\.f32\b", ptx)),
    }


for device in sys.argv[1:]:
    for entry in KERNELS:
        sys.stdout.write(json.dumps(compile_one(*entry, int(device))) + "\n")
