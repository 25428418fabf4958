"""Where the processes of a pool run: devices, sets of shared ones, cores. Pure."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from .config_model import ModelConfig


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one replica."""

    index: int
    """Of its model in the settings."""
    replica: int
    devices: tuple[int, ...] = ()
    """CUDA devices, one for each of its processes; empty: what is there."""
    share: float | None = None
    """Of a device or the host, for each of its processes."""
    processes: int = 1


def replica_devices(model: ModelConfig, replica: int) -> tuple[int, ...]:
    """Returns the devices of a replica: `tp` of the model's in turn, from the front
    again when all are given out.

    Args:
        model: Its settings.
        replica: From 0.
    """
    devices = model.devices
    begin = replica * model.tp % len(devices) if devices else 0
    return devices[begin : begin + model.tp]


def slots_of(models: Sequence[ModelConfig]) -> list[Slot]:
    """Returns the places of all replicas, in the order of models and replicas."""
    return [
        Slot(
            index=index,
            replica=replica,
            devices=replica_devices(model, replica),
            share=model.share,
            processes=model.tp,
        )
        for index, model in enumerate(models)
        for replica in range(model.replicas)
    ]


def shared_sets(slots: Sequence[Slot]) -> list[tuple[int, ...]]:
    """Returns the sets of devices that need a server each, in rising order.

    A set is of devices that are joined by replicas on several of them; one in which
    each device has one process alone is left out.

    Args:
        slots: All replicas.
    """
    joined: dict[int, set[int]] = {}
    for slot in slots:
        together = set(slot.devices)
        for device in slot.devices:
            together |= joined.get(device, set())
        for device in together:
            joined[device] = together
    counts: defaultdict[int, int] = defaultdict(int)
    for slot in slots:
        for device in slot.devices:
            counts[device] += 1
    unique = {tuple(sorted(members)) for members in joined.values()}
    return sorted(one for one in unique if any(counts[device] > 1 for device in one))


def core_slices(slots: Sequence[Slot], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the processor cores of each replica; empty: not bounded.

    Replicas that share the host have neighbouring cores of their own. Where there are
    fewer cores than replicas, several have the same one.

    Args:
        slots: All replicas. Those on listed devices are not bounded.
        cores: Numbers of the cores that may be used.
    """
    found: list[tuple[int, ...]] = []
    given = 0.0
    for slot in slots:
        if slot.share is None or slot.devices or not cores:
            found.append(())
            continue
        begin = round(given * len(cores))
        given += slot.share * slot.processes
        begin = min(begin, len(cores) - 1)
        end = max(begin + 1, min(len(cores), round(given * len(cores))))
        found.append(tuple(cores[begin:end]))
    return found
