"""The sets of kernels, and which of them this host runs.

C++ when the extension was built at install, else Numba, else plain torch. Linear layers
and KV writes give the same bits in all of them, attention agrees to 1e-5.
`TOKENMILL_KERNELS=cpp|numba|reference` forces one.
"""

import os
from collections.abc import Callable
from typing import Protocol

import structlog
import torch

from ....shared.errors import ConfigError
from . import reference
from .composed import Composed, LlamaLayerWeights, Primitives
from .layout import KVLayer, PackedWeight, StepLayout

FORCE_VARIABLE = "TOKENMILL_KERNELS"


class Backend(Primitives, Protocol):
    """What a set of kernels offers. Arguments are already checked."""

    @property
    def name(self) -> str:
        """For people, with the instruction set: "c++/avx2"."""
        ...

    def quantize_weight(self, w: torch.Tensor, *, activations: str) -> PackedWeight:
        """See `reference.quantize_weight`."""
        ...

    def llama_layer(
        self,
        x: torch.Tensor,
        weights: LlamaLayerWeights,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: KVLayer,
        layout: StepLayout,
    ) -> None:
        """See `ops.llama_layer`."""
        ...

    def set_num_threads(self, count: int) -> None:
        """Bounds the threads of every later call."""
        ...


class ReferenceBackend(Composed):
    """Plain torch: slow, always there."""

    name = "torch"
    quantize_weight = staticmethod(reference.quantize_weight)
    kv_write = staticmethod(reference.kv_write)
    paged_attention = staticmethod(reference.paged_attention)
    linear = staticmethod(reference.linear)

    def set_num_threads(self, count: int) -> None:
        """Does nothing: torch's own threads do the work."""


def _open(kind: str) -> Backend:
    """Returns a backend, or raises ImportError or OSError with the reason."""
    if kind == "cpp":
        from .cpu.cpp_backend import CppBackend

        return CppBackend()
    if kind == "numba":
        from .cpu.numba_backend import NumbaBackend

        return NumbaBackend()
    return ReferenceBackend()


def _choose(forced: str | None) -> tuple[Backend, str]:
    """Returns the backend in force and why it is that one."""
    if forced:
        if forced not in ("cpp", "numba", "reference"):
            raise ConfigError(
                FORCE_VARIABLE,
                f"'{forced}' is not a backend; expected cpp, numba or reference",
                "environment",
            )
        return _open(forced), f"forced by {FORCE_VARIABLE}"
    refused: list[str] = []
    for kind in ("cpp", "numba"):
        try:
            return _open(kind), "; ".join(refused) or "fastest available"
        except (ImportError, OSError) as error:
            refused.append(f"{kind} unavailable: {error}")
    return ReferenceBackend(), "; ".join(refused)


_active: Backend | None = None
_reason = ""


def backend() -> Backend:
    """Returns the backend in force; the first call chooses and logs it."""
    global _active, _reason
    if _active is None:
        _active, _reason = _choose(os.environ.get(FORCE_VARIABLE))
        log = structlog.get_logger("tokenmill.kernels")
        note = log.info if _active.name.startswith("c++") else log.warning
        note("kernels_chosen", backend=_active.name, reason=_reason)
    return _active


def surround(make: Callable[[Backend], Backend]) -> None:
    """Puts something around the kernels in force, as clocks for a profile.

    Args:
        make: Gets the kernels and returns what is called from now on.
    """
    global _active
    _active = make(backend())


def backend_report() -> dict[str, str]:
    """Returns the backend in force and why, for `tokenmill doctor`."""
    return {"backend": backend().name, "reason": _reason}


def set_num_threads(count: int, *, torch_threads: int | None = None) -> None:
    """Sets how many threads the kernels and torch use.

    Compiled kernels bring threads of their own, so torch gets one by default: its
    OpenMP team would spin against them, and its barriers stall on busy cores.

    Args:
        count: At least 1.
        torch_threads: Torch's threads; None is 1 beside compiled kernels, else `count`.
    """
    own_threads = backend().name != "torch"
    torch.set_num_threads(torch_threads or (1 if own_threads else count))
    backend().set_num_threads(count)
