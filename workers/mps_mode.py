"""The compute mode of devices: set for a daemon's life, where settings ask for it."""

import subprocess
from collections.abc import Sequence
from typing import Final

import structlog

from ..shared.cuda_devices import Device, smi
from ..shared.errors import ConfigError

_EXCLUSIVE: Final = "Exclusive_Process"
_TIMEOUT_S: Final = 30.0
_log = structlog.get_logger(__name__)


class ComputeModes:
    """Modes of some devices.

    Args:
        devices: As found, with the modes that they have now.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._changed: list[Device] = []

    def exclude(self) -> None:
        """Lets no process but the MPS server have the devices.

        Raises:
            ConfigError: It takes root, or nvidia-smi is not there.
        """
        for device in self._devices:
            if device.compute_mode == _EXCLUSIVE:
                continue
            problem = _set(device, _EXCLUSIVE.upper())
            if problem is not None:
                self.restore()
                raise ConfigError(
                    "mps.exclusive",
                    f"the compute mode of {device.id} cannot be set: {problem}; run as "
                    "root, or leave mps.exclusive false: MPS works without",
                )
            self._changed.append(device)

    def restore(self) -> None:
        """Gives the devices back the modes that they had."""
        while self._changed:
            device = self._changed.pop()
            problem = _set(device, device.compute_mode.upper())
            if problem is not None:
                _log.warning(
                    "compute_mode_not_restored", device=device.id, error=problem
                )


def _set(device: Device, mode: str) -> str | None:
    """Returns what went wrong, or None."""
    program = smi()
    if program is None:
        return "nvidia-smi is not on PATH"
    try:
        ran = subprocess.run(
            [program, "-i", device.id, "-c", mode],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    if ran.returncode == 0:
        _log.info("compute_mode_set", device=device.id, mode=mode)
        return None
    said = " ".join((ran.stdout + ran.stderr).split())
    return said[:200] or f"exit code {ran.returncode}"
