"""What this host computes with: CPU features and a CUDA device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

_CPUINFO: Final = Path("/proc/cpuinfo")
_FEATURES: Final[Mapping[str, str]] = {
    "avx2": "avx2",
    "avx_vnni": "avxvnni",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "amx_int8": "amxint8",
    "amx_bf16": "amxbf16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
}
"""Names in /proc/cpuinfo, and as compilers call them."""
INT8_FEATURES: Final = frozenset({"avxvnni", "avx512vnni", "dotprod", "i8mm"})
"""Each multiplies and adds INT8 in one instruction."""
BF16_FEATURES: Final = frozenset({"avx512bf16", "amxbf16", "bf16"})


class Cuda(msgspec.Struct, frozen=True):
    """Whether there is a CUDA device."""

    usable: bool
    text: str
    """Its name and memory, or why there is none."""


def cpu_features() -> frozenset[str] | None:
    """Returns the CPU's features that matter to kernels; None where nobody says."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags = set(value.split())
            return frozenset(ours for name, ours in _FEATURES.items() if name in flags)
    return None


def cuda() -> Cuda:
    """Returns whether torch can use a CUDA device, and what it is or why not."""
    import torch

    if torch.version.cuda is None:
        return Cuda(usable=False, text=f"torch {torch.__version__} is a CPU build")
    if not torch.cuda.is_available():
        return Cuda(
            usable=False,
            text=f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, "
            "and finds no device or driver",
        )
    found = torch.cuda.get_device_properties(0)
    count = torch.cuda.device_count()
    more = f", one of {count}" if count > 1 else ""
    gib = found.total_memory / 1024**3
    return Cuda(usable=True, text=f"{found.name}, {gib:.0f} GiB{more}")


def unfit_precisions(device: str) -> dict[str, str]:
    """Returns the precisions of weights that a device computes badly, and why.

    Args:
        device: "cpu" or "cuda".
    """
    if device != "cpu":
        return {}
    unfit = {
        "float16": "CPUs widen each float16 weight before they multiply: far slower "
        "than float32",
        "nf4": "4-bit weights are unpacked for every product on a CPU: far slower than "
        "INT8",
    }
    if not BF16_FEATURES & (cpu_features() or frozenset()):
        unfit["bfloat16"] = (
            "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16): 10 to 50 "
            "times slower than float32"
        )
    return unfit
