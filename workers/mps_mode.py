"""The compute mode of devices: set for a daemon's life, where settings ask for it."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ..shared.cuda_devices import EXCLUSIVE, Device, smi
from ..shared.errors import ConfigError

_TIMEOUT_S: Final = 30.0
_FILE: Final = "tokenmill.modes"
_log = structlog.get_logger(__name__)


class ComputeModes:
    """Modes of some devices.

    What is to be given back is in a file before anything changes, so that whoever comes
    after a process that was killed gives it back.

    Args:
        devices: As found, with the modes that they have now.
        directory: For the file.
    """

    def __init__(self, devices: Sequence[Device], directory: Path) -> None:
        self._devices = tuple(devices)
        self._file = directory / _FILE

    def exclude(self) -> None:
        """Lets no process but the MPS server have the devices.

        Raises:
            ConfigError: It takes root, or nvidia-smi is not there.
        """
        others = [one for one in self._devices if one.compute_mode != EXCLUSIVE]
        if not others:
            return
        now = {device.id: device.compute_mode for device in others}
        self._keep(now | self._kept())
        for device in others:
            problem = _set(device.id, EXCLUSIVE)
            if problem is not None:
                self.restore()
                raise ConfigError(
                    "mps.exclusive",
                    f"the compute mode of {device.id} cannot be set: {problem}; run as "
                    "root, or leave mps.exclusive false: MPS works without",
                )

    def restore(self) -> None:
        """Gives the devices back the modes that they had."""
        left = {}
        for device, mode in self._kept().items():
            problem = _set(device, mode)
            if problem is not None:
                left[device] = mode
                _log.warning("compute_mode_not_restored", device=device, error=problem)
        self._keep(left)

    def _kept(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}

    def _keep(self, modes: dict[str, str]) -> None:
        if modes:
            self._file.write_bytes(msgspec.json.encode(modes))
        else:
            self._file.unlink(missing_ok=True)


def _set(device: str, mode: str) -> str | None:
    """Returns what went wrong, or None."""
    program = smi()
    if program is None:
        return "nvidia-smi is not on PATH"
    try:
        ran = subprocess.run(
            [program, "-i", device, "-c", mode.upper()],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    if ran.returncode == 0:
        _log.info("compute_mode_set", device=device, mode=mode)
        return None
    said = " ".join((ran.stdout + ran.stderr).split())
    return said[:200] or f"exit code {ran.returncode}"
