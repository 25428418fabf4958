"""Where a model computes: this host with the CPU's kernels, or a GPU with Triton's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog
import torch

from ....shared.errors import ModelLoadError
from ..kernels import ops as host_ops
from ..kernels.protocol import OpsProtocol
from .budget import memory_share

if TYPE_CHECKING:
    from torch import nn

    from ..kernels.layout import StepLayout
    from ..kv.store import KVStore
    from .quantize import Weights

log = structlog.get_logger("tokenmill.model")

_GPU_WEIGHTS: Final = ("int8-a8", "int8-bnb")
"""Precisions whose linear layers need a GPU's kernels."""
DEVICES: Final = ("auto", "cpu", "cuda")
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_BFLOAT16_CAPABILITY: Final = (8, 0)
"""From this compute capability on a GPU multiplies bfloat16 at full rate."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device, the operations on it, and the type of what is not quantized."""

    device: torch.device
    ops: OpsProtocol
    """The module `kernels.ops`, or a `TritonOps` for this device."""
    dtype: torch.dtype
    """Of activations, embeddings, norms and weights that stay floats."""

    @property
    def is_accelerator(self) -> bool:
        """Whether the operations are those of a GPU, real or interpreted."""
        return self.ops is not host_ops

    @property
    def name(self) -> str:
        """The device as `free_memory` and messages name it: "cpu", "cuda:0"."""
        return str(self.device)


def host_target(weights: Weights) -> Target:
    """Returns this host's CPU with the kernels in force."""
    dtype = _DTYPES.get(weights, torch.float32)
    return Target(torch.device("cpu"), host_ops, dtype)


def choose_target(device: str, weights: Weights) -> Target:
    """Returns where a model is to run, and logs why.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
        weights: Precision of the linear layers.

    Raises:
        ModelLoadError: The device is unknown or not there.
    """
    if device not in DEVICES:
        raise ModelLoadError(
            f"device {device!r} is unknown; expected one of {', '.join(DEVICES)}"
        )
    if device == "cpu":
        return host_target(weights)
    missing = _why_no_gpu()
    if missing is None:
        target = _gpu_target(weights)
        name = torch.cuda.get_device_name(target.device)
        log.info("device_chosen", device=target.name, name=name, asked=device)
        return target
    if device == "cuda":
        raise ModelLoadError(
            f"device 'cuda' cannot be used: {missing}; on a machine with an NVIDIA GPU "
            "install a CUDA build of torch and 'tokenmill[gpu]', else use 'cpu'"
        )
    log.info("device_chosen", device="cpu", asked=device, reason=missing)
    return host_target(weights)


def _why_no_gpu() -> str | None:
    """Returns what is missing for a GPU, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"the kernels cannot be loaded ({error})"
    return None


def _gpu_target(weights: Weights) -> Target:
    from .gpu.linear import gpu_ops

    index = torch.cuda.current_device()
    device = torch.device("cuda", index)
    if (share := memory_share()) is not None:
        torch.cuda.set_per_process_memory_fraction(share, device)
    half = (
        torch.bfloat16
        if torch.cuda.get_device_capability(device) >= _BFLOAT16_CAPABILITY
        else torch.float16
    )
    ops = gpu_ops(device, measured=weights == "int8-a8")
    return Target(device, ops, _DTYPES.get(weights, half))


def check_device(weights: str, device: str) -> None:
    """Refuses a precision that a CPU has no kernels for.

    Args:
        weights: Precision.
        device: "cpu" or a CUDA device.

    Raises:
        ModelLoadError: It needs a GPU.
    """
    if weights in _GPU_WEIGHTS and device == "cpu":
        raise ModelLoadError(
            f"weights={weights!r} needs a GPU's kernels; use 'int8' on a CPU"
        )


def place_store(store: KVStore, target: Target) -> None:
    """Moves a pool to the device, layer by layer; a pool there already stays.

    Args:
        store: As made on the host, untouched.
        target: Where the model computes.
    """
    if target.device.type == "cpu":
        return
    from ..kernels.triton.layout import empty_store_like

    store.layers = tuple(
        empty_store_like(layer, target.device) for layer in store.layers
    )


def place_layout(layout: StepLayout, target: Target) -> StepLayout:
    """Returns a step's layout where the kernels read it.

    Args:
        layout: Built on the host.
        target: Where the model computes.
    """
    if not target.is_accelerator:
        return layout
    from ..kernels.triton.layout import to_device

    return to_device(layout, target.device)


def place_buffers(model: nn.Module, home: Callable[[str], torch.device]) -> None:
    """Moves what the checkpoint does not hold: rotary frequencies and the like.

    Args:
        model: Its parameters are in place.
        home: The device of a module's tensors, by the module's dotted name.
    """
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                module._buffers[name] = buffer.to(home(module_name))  # noqa: SLF001


def release_caches(device: torch.device) -> None:
    """Gives memory that torch's allocator keeps unused back to the device.

    It waits for the device and makes the next steps allocate anew, so call it only
    when memory has run out.

    Args:
        device: Where the model computes; nothing is kept on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
