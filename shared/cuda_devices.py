"""Which CUDA devices this host has, by nvidia-smi and CUDA_VISIBLE_DEVICES.

Without torch: the supervisor, which must know, is to stay light.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from .errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
"""nvidia-smi counts by bus; CUDA by speed, unless told otherwise."""
EXCLUSIVE: Final = "Exclusive_Process"
"""The compute mode in which one process has a device, which may be MPS' server."""
_FIELDS: Final = "index,uuid,memory.total,mig.mode.current,compute_mode"
_QUERY: Final = (f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
_TIMEOUT_S: Final = 20.0
_NODES: Final = Path("/dev")
_NODE: Final = re.compile(r"nvidia\d+")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device, as a process names it to CUDA."""

    id: str
    """UUID where nvidia-smi tells it, else a number."""
    memory_mib: int | None = None
    mig: bool = False
    """Whether it is divided into instances."""
    compute_mode: str = "Default"
    """Default, Exclusive_Process or Prohibited."""


def devices_here(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Returns this host's devices in the order in which settings number them.

    That is the order of CUDA_VISIBLE_DEVICES where it is set, as in a batch job that
    was given some of a host's devices, else that of nvidia-smi. As CUDA does, the list
    is read up to the first word that names no device.

    Args:
        environ: The process's environment.
    """
    told = _asked()
    visible = environ.get(VISIBLE)
    if visible is None:
        return tuple(told or _nodes())
    own: list[Device] = []
    for word in (word.strip() for word in visible.split(",")):
        device = _named(word, told) if told else _unseen(word)
        if device is None:
            break
        own.append(device)
    return tuple(own)


def chosen(devices: Sequence[Device], numbers: Sequence[int], key: str) -> list[Device]:
    """Returns devices by number.

    Args:
        devices: Those of this host.
        numbers: As in the settings.
        key: The setting, for the message.

    Raises:
        ConfigError: There is no such device.
    """
    for number in numbers:
        if not 0 <= number < len(devices):
            there = (
                f"this host has {len(devices)}, numbered from 0"
                if devices
                else "no NVIDIA device is here, or its driver is not loaded"
            )
            raise ConfigError(
                key,
                f"there is no device {number}: {there} (nvidia-smi lists them, "
                f"{VISIBLE} narrows them)",
            )
    return [devices[number] for number in numbers]


def smi() -> str | None:
    """Returns the path of nvidia-smi, or None."""
    return shutil.which("nvidia-smi")


def _named(word: str, found: Sequence[Device]) -> Device | None:
    if word.startswith("MIG-"):
        return Device(id=word, mig=True)
    for number, device in enumerate(found):
        is_prefix = word.startswith("GPU-") and device.id.startswith(word)
        if word == str(number) or is_prefix:
            return device
    return None


def _unseen(word: str) -> Device | None:
    """Without nvidia-smi the variable is taken at its word."""
    if word in ("", "-1"):
        return None
    return Device(id=word, mig=word.startswith("MIG-"))


def _nodes() -> list[Device]:
    """Without nvidia-smi, as in some containers, the driver's device files count."""
    try:
        names = [path.name for path in _NODES.iterdir() if _NODE.fullmatch(path.name)]
    except OSError:
        return []
    return [Device(id=str(number)) for number in range(len(names))]


def _asked() -> list[Device]:
    program = smi()
    if program is None:
        return []
    try:
        asked = subprocess.run(
            [program, *_QUERY],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if asked.returncode:
        return []
    return [_device(line) for line in asked.stdout.splitlines() if line.strip()]


def _device(line: str) -> Device:
    index, uuid, memory, mig, mode = (part.strip() for part in line.split(",")[:5])
    return Device(
        id=uuid or index,
        memory_mib=int(memory) if memory.isdigit() else None,
        mig=mig == "Enabled",
        compute_mode=mode,
    )
