"""What settings of several models must satisfy: devices, shares, buckets, limits."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

import msgspec

from .config import Config, ModelConfig
from .errors import ConfigError
from .placing import slots_of

_ROUNDING: Final = 1e-6
"""Three shares of 0.3333334 are one device."""
_MOST_TP: Final = 64


def is_rising(value: object) -> bool:
    """Whether these can be bounds of length buckets."""
    return (
        isinstance(value, tuple)
        and 1 <= len(value) <= 16
        and value[0] >= 1
        and all(a < b for a, b in pairwise(value))
    )


def check_placement(
    config: Config,
    origins: Mapping[str, str],
    limit_problem: Callable[[str, object], str | None],
) -> None:
    """Raises on the first model that cannot be placed or has wrong bounds.

    Args:
        config: Settings of the right types.
        origins: Dotted key -> where its value came from, for the message.
        limit_problem: Says what is wrong with a value of `[limits]`, by field.

    Raises:
        ConfigError: Names the key, the value and what would work.
    """
    for index, model in enumerate(config.models):
        key = f"models[{index}]"
        for field, problem in (
            ("tp", _tp_problem(model)),
            ("share", _share_problem(model)),
            ("devices", _devices_problem(model)),
            ("buckets", _buckets_problem(model)),
        ):
            if problem is not None:
                name = f"{key}.{field}"
                raise ConfigError(name, problem, origins.get(name))
        for field, value in msgspec.structs.asdict(model.limits).items():
            problem = None if value is None else limit_problem(field, value)
            if problem is not None:
                name = f"{key}.limits.{field}"
                raise ConfigError(name, problem, origins.get(f"{key}.limits"))
    _check_sums(config, origins)


def _tp_problem(model: ModelConfig) -> str | None:
    if 1 <= model.tp <= _MOST_TP:
        return None
    return f"value {model.tp}; expected 1 to {_MOST_TP} processes for a replica"


def _share_problem(model: ModelConfig) -> str | None:
    if model.share is None or 0 < model.share <= 1:
        return None
    return (
        f"value {model.share:g}; expected above 0 and at most 1, as 0.5 for half of a "
        "device or host, or nothing for no bound"
    )


def _buckets_problem(model: ModelConfig) -> str | None:
    if model.buckets is None or is_rising(model.buckets):
        return None
    return (
        f"value {model.buckets}; expected 1 to 16 rising numbers of tokens, or nothing "
        "for pool.buckets"
    )


def _devices_problem(model: ModelConfig) -> str | None:
    devices, tp, whole = model.devices, model.tp, model.tp * model.replicas
    if not devices:
        return None
    if min(devices) < 0:
        return f"value {list(devices)}; CUDA devices are numbered from 0"
    if model.replicas and (len(devices) > whole or len(devices) % tp):
        fewer = [n for n in range(tp, whole, tp) if whole % n == 0]
        also = f", or {' or '.join(map(str, fewer))} to share" if fewer else ""
        return (
            f"{len(devices)} are listed; expected {whole}, tp={tp} for each of "
            f"{model.replicas} replicas{also}"
        )
    if model.replicas and whole % len(devices):
        return (
            f"{len(devices)} are listed, which {model.replicas} replicas of tp={tp} "
            f"cannot share out evenly; expected {whole}, or a part of it that divides "
            f"{whole}"
        )
    for replica in range(0, len(devices), tp):
        own = devices[replica : replica + tp]
        if len(set(own)) < tp:
            return (
                f"value {list(devices)}; the {tp} processes of a replica need a device "
                f"each, and one would have {list(own)}"
            )
    return None


def _check_sums(config: Config, origins: Mapping[str, str]) -> None:
    """More than a whole device cannot be given away: a share is of memory as well."""
    takers: defaultdict[int | None, list[tuple[int, float]]] = defaultdict(list)
    for slot in slots_of(config.models):
        if slot.share is not None:
            # Without devices all processes are on the host, or on the only device.
            for place in slot.devices or (None,) * slot.processes:
                takers[place].append((slot.index, slot.share))
    for place, shares in takers.items():
        total = sum(share for _, share in shares)
        if total <= 1 + _ROUNDING:
            continue
        where = "this host" if place is None else f"device {place}"
        each = ", ".join(
            f"{config.models[i].name} {share:g}" for i, share in shares[:8]
        )
        key = f"models[{shares[-1][0]}].share"
        raise ConfigError(
            key,
            f"the shares of {where} come to {total:.4g} ({each}): a share is of memory "
            f"too, so that there is not more than 1; lower them to {1 / total:.3g} of "
            "what they are, or have fewer processes there",
            origins.get(key),
        )
