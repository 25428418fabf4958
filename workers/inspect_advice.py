"""Gathers what the advice on a precision needs: the model's sizes and the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from ..shared.errors import ConfigError
from .engine.model.advice import Advice, Model, Situation, advise
from .engine.model.sizes import precision_of
from .host import unfit_precisions
from .host_speed import compute_rates, host_bandwidth

if TYPE_CHECKING:
    from .engine.model.inspection import Question

_TRANSFER: Final = 25e9
"""Bytes a second from host to device: what PCIe 4.0 with 16 lanes gives in practice."""


class AdviceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks of a device."""

    slo_ms: float | None
    bandwidth: float | None
    """Bytes a second; None asks or measures the device."""
    step_ms: float | None
    """A decode step of all running sequences, as measured."""
    running: int
    threads: int | None = None
    """Of a worker on this host; None is one a core."""


def advise_for(
    facts: Mapping[str, Any], question: Question, options: AdviceOptions
) -> Advice:
    """Advises a precision.

    Args:
        facts: From `describe`.
        question: What `describe` was asked.
        options: Target and device.

    Raises:
        ConfigError: The device's bandwidth is neither given nor known here.
    """
    model = Model(
        weights_bytes=facts["weights_bytes"],
        read_bytes=facts["weights_read_bytes"],
        kv_bytes_per_token={
            kind: pool["bytes_per_token"] for kind, pool in facts["kv"].items()
        },
        products_per_token=facts["products_per_token"],
    )
    is_host = question.device == "cpu"
    unfit = unfit_precisions(question.device)
    measures = is_host and options.step_ms is None
    fit = [name for name in model.weights_bytes if name not in unfit]
    situation = Situation(
        memory_bytes=facts["memory"]["free_bytes"],
        bandwidth=options.bandwidth or _bandwidth(question.device),
        compute=compute_rates(fit, options.running, options.threads)
        if measures
        else {},
        slo_ms=options.slo_ms,
        running=options.running,
        tokens=question.typical_tokens,
        measured_step_ms=options.step_ms,
        measured_weights=precision_of(question.weights),
        measured_kv=question.kv,
        host_bytes=0 if is_host else int(psutil.virtual_memory().available),
        transfer_bandwidth=0.0 if is_host else _TRANSFER,
        unfit=unfit,
        unseen_words_share=facts["calibration"].get("unseen_words_share"),
    )
    return advise(model, situation)


def _bandwidth(device: str) -> float:
    if device == "cpu":
        return host_bandwidth()
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device)
        clock_khz = getattr(found, "memory_clock_rate", 0)
        width_bits = getattr(found, "memory_bus_width", 0)
        if clock_khz and width_bits:
            return 2 * clock_khz * 1000 * width_bits / 8  # two transfers a clock
    raise ConfigError(
        "bandwidth_gb_s",
        "the memory bandwidth of that device is not known here; give it, for example "
        "--bandwidth-gb-s 300 (L4), 600 (A10), 2000 (A100) or 3350 (H100)",
        "command line",
    )
