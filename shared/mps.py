"""CUDA's Multi-Process Service: whether it can be had, where it is, who is told what.

Facts about MPS are NVIDIA's (docs.nvidia.com/deploy/mps): a daemon behind a directory
of pipes starts one server for its user; processes that find the directory send their
kernels through it, within a share of the threads and of the memory that their
environment names.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from .config_mps import MpsConfig
from .cuda_devices import BY_BUS, ORDER, VISIBLE, Device

PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
DEFAULT_PIPES: Final = Path("/tmp/nvidia-mps")  # noqa: S108 - where CUDA looks
"""CUDA's own, when the variable is not set."""
CONTROL: Final = "nvidia-cuda-mps-control"
EXPECTED: Final = "TOKENMILL_PROC_MPS"
"""Tells a worker that a daemon is being started for it: `on` or `auto`."""
_SOCKET: Final = "control_privileged"
"""The longest name of a socket in the directory."""
_LONGEST_SOCKET: Final = 107
"""Bytes of a Unix socket's address: the daemon ends without a word beyond it."""


class DeviceSet(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that one daemon serves, and where it is."""

    numbers: tuple[int, ...]
    """As in the settings, rising."""
    devices: tuple[Device, ...]
    pipes: Path
    logs: Path
    is_ours: bool
    """Whether the pool starts the daemon."""

    @property
    def name(self) -> str:
        """`0,1` for devices 0 and 1."""
        return ",".join(map(str, self.numbers))


def directories(state_dir: Path, numbers: Sequence[int]) -> tuple[Path, Path]:
    """Returns the directories of pipes and of logs of a set's own daemon."""
    root = state_dir / "mps" / "-".join(map(str, numbers))
    return root / "pipe", root / "log"


def find_control(settings: MpsConfig) -> Path | None:
    """Returns the control program, or None when it is not there."""
    if settings.control is None:
        found = shutil.which(CONTROL)
        return Path(found) if found else None
    path = Path(settings.control).expanduser()
    return path if os.access(path, os.X_OK) and path.is_file() else None


def why_not(settings: MpsConfig, devices: Sequence[Device], pipes: Path) -> str | None:
    """Returns why these devices cannot be shared through MPS, or None.

    Args:
        settings: Of MPS.
        devices: Of one set.
        pipes: The daemon's directory of pipes.
    """
    if settings.mode == "off":
        return "mps.mode is off"
    if sys.platform != "linux":
        return f"MPS exists on Linux, and this is {sys.platform}"
    if find_control(settings) is None:
        wanted = settings.control or f"{CONTROL} on PATH"
        return (
            f"there is no {wanted}; it comes with NVIDIA's driver, and mps.control "
            "names another place"
        )
    for device in devices:
        if device.mig:
            return (
                f"device {device.id} is in MIG mode, where a server is for one "
                "instance; give each instance a worker of its own by "
                f"{VISIBLE}, or end the mode with nvidia-smi -mig 0"
            )
        if device.compute_mode == "Prohibited":
            return (
                f"device {device.id} is in the compute mode Prohibited; nvidia-smi -c "
                "DEFAULT as root admits processes"
            )
    return _path_problem(pipes) or _user_problem(pipes)


def _path_problem(pipes: Path) -> str | None:
    length = len(os.fsencode(pipes / _SOCKET))
    if length <= _LONGEST_SOCKET:
        return None
    return (
        f"the address of a socket in {pipes} has {length} bytes and "
        f"{_LONGEST_SOCKET} are possible; choose a shorter pool.state_dir"
    )


def _user_problem(pipes: Path) -> str | None:
    """One daemon serves one user at a time, so another user's is of no use.

    Root's starts a server for whoever comes.
    """
    try:
        owner = (pipes / "control").stat().st_uid
    except OSError:
        return None
    if owner in (0, os.getuid()):
        return None
    return (
        f"the daemon behind {pipes} is of user {owner} and this process of user "
        f"{os.getuid()}; MPS serves one user at a time"
    )


def daemon_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Returns what a daemon's environment says of its devices."""
    return {ORDER: BY_BUS, VISIBLE: ",".join(device.id for device in devices)}


def client_environment(
    one: DeviceSet,
    numbers: Sequence[int],
    share: float | None,
    thread_factor: float = 1.0,
) -> dict[str, str]:
    """Returns the environment of a process that is served by MPS.

    Args:
        one: The set that has its devices.
        numbers: Its devices, as in the settings.
        share: Of each device's threads and memory; None is not bounded.
        thread_factor: Threads over the share.
    """
    own = [one.devices[one.numbers.index(number)] for number in numbers]
    told = {PIPES: str(one.pipes), LOGS: str(one.logs), ORDER: BY_BUS}
    # A server numbers its devices anew from 0; a UUID names one for everybody.
    told[VISIBLE] = ",".join(
        device.id
        if not device.id.isdigit() or not one.is_ours
        else str(one.devices.index(device))
        for device in own
    )
    if share is not None:
        told[THREADS] = f"{min(100.0, share * thread_factor * 100):g}"
        limits = [
            f"{device.id}={int(device.memory_mib * share)}M"
            for device in own
            if device.memory_mib is not None
        ]
        if limits:
            told[MEMORY] = ",".join(limits)
    return told


def plain_environment(devices: Sequence[Device]) -> dict[str, str]:
    """Returns the environment of a process that has devices without MPS."""
    return {
        ORDER: BY_BUS,
        VISIBLE: ",".join(device.id for device in devices),
        # A daemon of somebody else's, found by chance, would serve other devices.
        PIPES: os.devnull,
    }
