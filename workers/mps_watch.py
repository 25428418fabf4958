"""MPS as a worker sees it: waited for at the start, watched while it serves.

A fatal error of one client ends all clients of an MPS server, and the server takes new
ones only when all of them are gone. So a worker whose server is lost hands its jobs
back and ends; whoever supervises it starts it again, and it waits for the daemon.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ..shared.config_mps import MpsConfig
from ..shared.cuda_devices import VISIBLE
from ..shared.errors import MpsUnavailable
from ..shared.mps import DEFAULT_PIPES, EXPECTED, PIPES, find_control
from .bridge import EXIT_STUCK
from .mps_control import Control, Server, lost, takes_clients

if TYPE_CHECKING:
    from .bridge import Worker

_LOOK_EVERY_S: Final = 0.25
_log = structlog.get_logger(__name__)


async def joined(
    settings: MpsConfig, environ: MutableMapping[str, str] | None = None
) -> "MpsWatch | None":
    """Waits for the daemon that a supervisor starts, or finds one that is there.

    Call it before anything asks CUDA for a device.

    Args:
        settings: Of MPS.
        environ: This process's; None is the real one. What names a daemon that does not
            come is taken out of it.

    Returns:
        What watches it, or None where CUDA runs without MPS.

    Raises:
        MpsUnavailable: The settings want MPS, and its daemon does not come.
    """
    environ = os.environ if environ is None else environ
    pipes = Path(environ.get(PIPES) or DEFAULT_PIPES)
    program = find_control(settings)
    expected = environ.get(EXPECTED)
    if expected is None:
        if program is None or not (pipes / "control").exists():
            return None
        watch = MpsWatch(Control(program, pipes), settings.check_s)
        return watch if await watch.answers() else None
    if program is not None:
        watch = MpsWatch(Control(program, pipes), settings.check_s)
        if await watch.comes(settings.start_s):
            return watch
    _go_without(environ, expected, pipes, settings)
    return None


def _go_without(
    environ: MutableMapping[str, str], expected: str, pipes: Path, settings: MpsConfig
) -> None:
    problem = (
        f"no MPS daemon answers behind {pipes} after mps.start_s={settings.start_s:g} "
        "s; `tokenmill mps status` and the daemon's logs say more"
    )
    # A server's own numbers mean other devices without it.
    renumbered = environ.get(VISIBLE, "").replace(",", "").isdigit()
    if expected == "on" or renumbered:
        # Not the model's fault: whoever supervises tries again, as often as it takes.
        raise MpsUnavailable(problem)
    _log.warning("mps_off", reason=problem, effect="processes take turns")
    for name in [name for name in environ if name.startswith("CUDA_MPS_")]:
        del environ[name]
    environ[PIPES] = os.devnull


@asynccontextmanager
async def guarding(watch: "MpsWatch | None", worker: "Worker") -> AsyncIterator[None]:
    """Ends this process when its MPS server is lost while the block runs.

    Args:
        watch: Of its server; None where it has none.
        worker: Whose jobs are handed back.
    """
    if watch is None:
        yield
        return
    watching = asyncio.create_task(watch.guard(worker), name="mps")
    try:
        yield
    finally:
        watching.cancel()


class MpsWatch:
    """Notices that the server of this process is gone.

    Args:
        control: How to ask the daemon.
        check_s: Between two looks.
    """

    def __init__(self, control: Control, check_s: float) -> None:
        self._control = control
        self._check_s = check_s
        self.seen: tuple[Server, ...] = ()
        """Servers of the last look."""

    async def answers(self) -> bool:
        """Whether the daemon answers now."""
        return await self._servers() is not None

    async def comes(self, within_s: float) -> bool:
        """Whether the daemon takes clients within so many seconds.

        While one of its servers is in fault it takes none.
        """
        end = time.monotonic() + within_s
        while not takes_clients(now := await self._servers()):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        # One that goes while a model is being loaded is missed at the first look.
        self.seen = now or ()
        _log.info("mps_joined", pipes=str(self._control.pipes))
        return True

    async def lost(self) -> str:
        """Returns when the server is lost, and says why."""
        silent = 0
        while True:
            now = await self._servers()
            # Once may be a machine that is busy.
            silent = silent + 1 if now is None else 0
            if now is not None or silent > 1:
                reason = lost(self.seen, now)
                if reason is not None:
                    return reason
            self.seen = self.seen if now is None else now
            await asyncio.sleep(self._check_s)

    async def guard(self, worker: "Worker") -> None:
        """Ends the process, its jobs handed back, when the server is lost."""
        reason = await self.lost()
        _log.error("mps_server_lost", reason=reason)
        try:
            # Whose error it was is not known: it does not speak against our jobs.
            await worker.give_up(reason, counts=False)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STUCK)

    async def _servers(self) -> tuple[Server, ...] | None:
        return await asyncio.to_thread(self._control.servers)
