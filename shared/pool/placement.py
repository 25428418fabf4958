"""Places a pool's workers on devices and cores, and finds what MPS they need."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from ..config import Config
from ..connection import state_dir
from ..cuda_devices import Device, chosen, devices_here
from ..errors import ConfigError
from ..mps import (
    EXPECTED,
    DeviceSet,
    client_environment,
    directories,
    plain_environment,
    why_not,
)
from ..placing import Slot, core_slices, shared_sets, slots_of

CORES: Final = "TOKENMILL_PROC_CORES"
"""Processor cores that a worker is bound to, as `0,1`."""
_log = structlog.get_logger(__name__)


class Placement:
    """Where the workers of a pool run, from its settings and this host.

    Args:
        config: Settings in force, checked.
        environ: The supervisor's environment; None is the process's own.

    Raises:
        ConfigError: There is no such device, or MPS is asked for and cannot be had.
    """

    def __init__(
        self, config: Config, environ: Mapping[str, str] | None = None
    ) -> None:
        self._config = config
        self._environ = os.environ if environ is None else environ
        self._slots = slots_of(config.models)
        self._devices: tuple[Device, ...] = ()
        self.off: dict[str, str] = {}
        """Set of shared devices, as `0,1` -> why MPS is not used for it."""
        self.sets: tuple[DeviceSet, ...] = ()
        """Sets that are shared through MPS."""
        if any(slot.devices for slot in self._slots):
            self._find_devices()
            self._find_sets()
        self._cores = dict(
            zip(
                ((slot.index, slot.replica) for slot in self._slots),
                core_slices(self._slots, available_cores()),
                strict=True,
            )
        )

    def _find_devices(self) -> None:
        """Every number of the settings must be a device of this host."""
        if self._config.worker.device == "cpu":
            at = next(slot.index for slot in self._slots if slot.devices)
            raise ConfigError(
                f"models[{at}].devices",
                "lists CUDA devices, and worker.device is cpu; leave one of them out",
            )
        self._devices = devices_here(self._environ)
        for slot in self._slots:
            chosen(self._devices, slot.devices, f"models[{slot.index}].devices")

    def _find_sets(self) -> None:
        settings, found = self._config.mps, []
        for numbers in shared_sets(self._slots):
            one = self._set(numbers)
            reason = why_not(settings, one.devices, one.pipes)
            if reason is None:
                found.append(one)
            elif settings.mode == "on":
                raise ConfigError("mps.mode", f"value 'on', and {reason}")
            else:
                self.off[one.name] = reason
        self.sets = tuple(found)

    def _set(self, numbers: tuple[int, ...]) -> DeviceSet:
        given = self._config.mps.pipe_directory
        pipes, logs = directories(state_dir(self._config), numbers)
        if given is not None:
            pipes = logs = Path(given).expanduser().absolute()
        return DeviceSet(
            numbers=numbers,
            devices=tuple(self._devices[number] for number in numbers),
            pipes=pipes,
            logs=logs,
            is_ours=given is None,
        )

    def say(self) -> None:
        """Logs where MPS was wanted and is not used."""
        for name, reason in self.off.items():
            _log.warning(
                "mps_off", devices=name, reason=reason, effect="processes take turns"
            )

    def environment(self, slot: Slot, model: str) -> dict[str, str]:
        """Returns what a worker's environment says of its place.

        Args:
            slot: The worker's; one that is not of the settings has no cores of its own.
            model: What it serves, for the message.

        Raises:
            ConfigError: There is no such device.
        """
        told: dict[str, str] = {}
        if cores := self._cores.get((slot.index, slot.replica)):
            told[CORES] = ",".join(map(str, cores))
        if not slot.devices:
            return told
        devices = self._devices or devices_here(self._environ)
        own = chosen(devices, slot.devices, f"devices of {model}")
        for one in self.sets:
            if set(slot.devices) <= set(one.numbers):
                told |= client_environment(one, slot.devices, slot.share)
                told[EXPECTED] = self._config.mps.mode
                return told
        return told | plain_environment(own)


def available_cores() -> tuple[int, ...]:
    """Returns the cores that this process may use; empty where nobody says."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return ()
