"""Settings of CUDA's Multi-Process Service: the table `[mps]`."""

from typing import Literal

import msgspec


class MpsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sharing CUDA devices between processes (docs/multi-model.md)."""

    mode: Literal["auto", "on", "off"] = "auto"
    """auto uses MPS where two processes share a device and MPS can be had; on refuses
    to start where it cannot; off lets them take turns."""
    control: str | None = None
    """The control program; None finds nvidia-cuda-mps-control on PATH."""
    pipe_directory: str | None = None
    """Pipes of a daemon that runs already: it is used and never stopped. None starts
    one for each set of shared devices, with directories in pool.state_dir."""
    exclusive: bool = False
    """Put shared devices into the compute mode EXCLUSIVE_PROCESS while the daemon
    runs, which takes root; otherwise the mode is left alone."""
    thread_factor: float = 1.0
    """Threads of a process over its share: 2 lets each use twice as many, for
    processes that seldom work at once. Memory stays within the shares."""
    start_s: float = 30.0
    """How long a daemon may take to answer, and workers wait for it."""
    check_s: float = 2.0
    """Between two looks at the daemon and its servers."""
