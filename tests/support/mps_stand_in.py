"""A stand-in for nvidia-cuda-mps-control and nvidia-smi: no GPU, the same interface.

It is not MPS: `mps_stand_in_program.py` says what it does.
"""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .waiting import wait_until_sync

NAME = "nvidia-cuda-mps-control"
_PROGRAM = Path(__file__).absolute().with_name("mps_stand_in_program.py")
DEVICES = (
    "0, GPU-aaaaaaaa-0000-0000-0000-000000000000, 80000, {mig}, {mode}",
    "1, GPU-bbbbbbbb-1111-1111-1111-111111111111, 80000, Disabled, Default",
)
UUIDS = tuple(line.split(", ")[1] for line in DEVICES)
"""Of the devices that the stand-in of nvidia-smi tells."""


def install(directory: Path, *, mig: bool = False, mode: str = "Default") -> Path:
    """Puts stand-ins of both programs into a directory, for PATH.

    Args:
        directory: Is made.
        mig: Whether device 0 is in MIG mode.
        mode: Compute mode of device 0.

    Returns:
        The control program's stand-in.
    """
    directory.mkdir(parents=True, exist_ok=True)
    told = "\n".join(DEVICES).format(mig="Enabled" if mig else "Disabled", mode=mode)
    modes = directory / "modes-set"
    smi = f'case "$1" in -i) echo "$*" >>{modes};; *) cat <<END\n{told}\nEND\n;; esac'
    _program(directory / "nvidia-smi", smi)
    # Isolated from the site's packages, it starts in a third of the time.
    run = f'exec {sys.executable} -S {_PROGRAM} "$@"'
    return _program(directory / NAME, run)


def _program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def ask(program: Path, pipes: Path, command: str) -> str:
    """What the daemon behind a directory answers.

    Raises:
        subprocess.CalledProcessError: None answers.
    """
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    asked = subprocess.run(
        [program], input=f"{command}\n", env=env, text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    return asked.stdout.strip()


@contextmanager
def running(program: Path, pipes: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A daemon that somebody else has started, until the block ends."""
    pipes.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    daemon = subprocess.Popen([program, "-f"], env=env, stdout=subprocess.DEVNULL)
    try:
        wait_until_sync((pipes / "control").exists, what="the stand-in's daemon")
        yield daemon
    finally:
        daemon.terminate()
        daemon.wait(60)
