"""This host as a device of a plan: its free memory, and its rates as measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ..shared.errors import ConfigError
from .engine.model.budget import free_memory
from .host import unfit_precisions
from .planning.cards import GIB, HOST, Card, known_card, unknown_card

_TERA: Final = 1e12
_GIGA: Final = 1e9
_LOOPBACK: Final = 2e9
"""Bytes a second between processes of a host by gloo: an assumption."""
_LOOPBACK_LATENCY_S: Final = 200e-6
_OWN_LATENCY_S: Final = 30e-6
_PCIE: Final = 25e9
_INT8_FACTOR: Final = 2.0
"""INT8 rate of a card that is not in the table, over its 16-bit rate."""
_FLOAT32_FACTOR: Final = 0.125
_MEASURED_ROWS: Final = 64


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says of a card."""

    memory_gb: float | None = None
    """GiB."""
    bandwidth_gb_s: float | None = None
    tflops: float | None = None
    """Dense, half precision; of a host, whatever its weights are."""
    link_gb_s: float | None = None


def find_card(name: str, given: Given, threads: int | None = None) -> Card:
    """Returns a card of the table, this host, or one that is described.

    Args:
        name: As it was given.
        given: Goes over what the table has.
        threads: Of a worker on a host; None is one a core.

    Raises:
        ConfigError: Not known, and not described in full.
    """
    if name.lower() == HOST:
        return _host(given, threads)
    card = known_card(name)
    if card is None:
        return _own(name, given)
    changes: dict[str, object] = {}
    if given.memory_gb is not None:
        changes["memory_bytes"] = int(given.memory_gb * GIB)
    if given.bandwidth_gb_s is not None:
        changes["bandwidth"] = given.bandwidth_gb_s * _GIGA
    if given.tflops is not None:
        changes["tflops"] = _rates(given.tflops)
    if given.link_gb_s is not None:
        changes["link"] = given.link_gb_s * _GIGA
    return msgspec.structs.replace(card, **changes)


def _own(name: str, given: Given) -> Card:
    if given.memory_gb is None or given.bandwidth_gb_s is None or given.tflops is None:
        raise unknown_card(name)
    return Card(
        name=name,
        memory_bytes=int(given.memory_gb * GIB),
        bandwidth=given.bandwidth_gb_s * _GIGA,
        tflops=_rates(given.tflops),
        link=_PCIE if given.link_gb_s is None else given.link_gb_s * _GIGA,
        link_latency_s=_OWN_LATENCY_S,
    )


def _rates(half: float) -> dict[str, float]:
    return {
        "float32": half * _FLOAT32_FACTOR,
        "half": half,
        "int8": half * _INT8_FACTOR,
    }


def _host(given: Given, threads: int | None) -> Card:
    unfit = unfit_precisions("cpu")
    memory = (
        free_memory().size if given.memory_gb is None else int(given.memory_gb * GIB)
    )
    link = _LOOPBACK if given.link_gb_s is None else given.link_gb_s * _GIGA
    return Card(
        name=HOST,
        memory_bytes=memory,
        bandwidth=_bandwidth(given),
        tflops=_measured(given, unfit, threads),
        link=link,
        link_latency_s=_LOOPBACK_LATENCY_S,
        is_host=True,
        unfit=unfit,
    )


def _bandwidth(given: Given) -> float:
    if given.bandwidth_gb_s is not None:
        return given.bandwidth_gb_s * _GIGA
    from .extras import model_stack

    with model_stack():
        from .host_speed import host_bandwidth

        return host_bandwidth()


def _measured(
    given: Given, unfit: Mapping[str, str], threads: int | None
) -> dict[str, float]:
    """Returns 10^12 operations a second by precision."""
    fit = [one for one in ("float32", "bfloat16", "int8") if one not in unfit]
    if given.tflops is not None:
        return dict.fromkeys(fit, given.tflops)
    from .extras import model_stack

    with model_stack():
        from .host_speed import compute_rates

        rates = compute_rates(fit, _MEASURED_ROWS, threads)
    return {name: 2 * rate / _TERA for name, rate in rates.items()}


def checked(name: str, value: float | None) -> None:
    """Refuses a figure of a card that is none.

    Raises:
        ConfigError: Not above 0.
    """
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(name, f"value {value}; expected above 0", "command line")
