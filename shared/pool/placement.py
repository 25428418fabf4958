"""Places a pool's workers on devices and cores, and finds what MPS they need."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from ..config import Config
from ..connection import state_dir
from ..cuda_devices import EXCLUSIVE, Device, chosen, devices_here
from ..errors import ConfigError
from ..mps import (
    DEFAULT_PIPES,
    EXPECTED,
    PIPES,
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
        elif self._slots:
            check_asked(config, self._environ)
            self._check_listed()
        self._cores: dict[str, list[tuple[int, ...]]] = {}
        """Model -> the cores of each of its replicas."""
        cores = core_slices(self._slots, available_cores())
        for slot, own in zip(self._slots, cores, strict=True):
            self._cores.setdefault(config.models[slot.index].name, []).append(own)

    def _check_listed(self) -> None:
        """Without listed devices MPS is had only from a daemon that is there."""
        there = Path(self._environ.get(PIPES) or DEFAULT_PIPES) / "control"
        if self._config.mps.mode != "on" or len(self._slots) < 2 or there.exists():
            return
        raise ConfigError(
            "mps.mode",
            "value 'on', and no model lists devices, so nobody knows which are shared; "
            "list them, as devices = [0], or set it to auto",
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
                _check_turns(one, reason)
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
            slot: The worker's.
            model: What it serves. A further version of a model has the cores of the
                model, whose share it is to keep to.

        Raises:
            ConfigError: There is no such device.
        """
        told: dict[str, str] = {}
        if replicas := self._cores.get(model):
            cores = replicas[slot.replica % len(replicas)]
            told |= {CORES: ",".join(map(str, cores))} if cores else {}
        if not slot.devices:
            return told
        devices = self._devices or devices_here(self._environ)
        own = chosen(devices, slot.devices, f"devices of {model}")
        for one in self.sets:
            if set(slot.devices) <= set(one.numbers):
                told |= client_environment(
                    one, slot.devices, slot.share, self._config.mps.thread_factor
                )
                told[EXPECTED] = self._config.mps.mode
                return told
        return told | plain_environment(own)


def check_asked(config: Config, environ: Mapping[str, str]) -> None:
    """Refuses `mps.mode = "on"` for processes that have no CUDA device.

    Args:
        config: Settings in force.
        environ: The process's environment.

    Raises:
        ConfigError: It is on, and there is none.
    """
    if config.mps.mode != "on":
        return
    if config.worker.device == "cpu":
        reason = "worker.device is cpu"
    elif not devices_here(environ):
        reason = "no NVIDIA device is here, or its driver is not loaded"
    else:
        return
    raise ConfigError(
        "mps.mode",
        f"value 'on', and {reason}: MPS is for processes that share a CUDA device; set "
        "it to auto, which goes without",
    )


def _check_turns(one: DeviceSet, reason: str) -> None:
    """Refuses to let processes take turns on a device that admits one alone."""
    for number, device in zip(one.numbers, one.devices, strict=True):
        if device.compute_mode == EXCLUSIVE:
            raise ConfigError(
                "mps.mode",
                f"several processes are to share device {number}, which is in the "
                f"compute mode {EXCLUSIVE} and so admits one, or MPS; and {reason}. "
                "Cure that, or end the mode with nvidia-smi -c DEFAULT as root",
            )


def available_cores() -> tuple[int, ...]:
    """Returns the cores that this process may use; empty where nobody says."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return ()
