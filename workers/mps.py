"""The MPS daemon of one set of devices: started or found, watched, ended if ours.

`tokenmill up` runs this as a process of its own for each set of devices that several
workers share. The daemon is its child, so that its end is noticed at once, and it ends
after the workers have drained.
"""

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ..shared.config_mps import MpsConfig
from ..shared.cuda_devices import Device
from ..shared.errors import MpsUnavailable
from ..shared.mps import DeviceSet, daemon_environment
from ..shared.pool.orphans import die_with_parent
from ..shared.tasks import end_tasks
from .mps_control import Control, Server, lost
from .mps_mode import ComputeModes

_LOOK_EVERY_S: Final = 0.1
_QUIT_S: Final = 5.0
"""Given to servers that still have clients."""
_MARK: Final = "tokenmill.started"
"""In the directory of pipes while a daemon that we started may be behind it: the ids
of its devices."""
_log = structlog.get_logger(__name__)


class Daemon:
    """A control daemon and its servers.

    Args:
        control: How to ask it.
        devices: Those that it serves.
        settings: Of MPS.
    """

    def __init__(
        self, control: Control, devices: Sequence[Device], settings: MpsConfig
    ) -> None:
        self._control = control
        self._devices = tuple(devices)
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._modes = ComputeModes(self._devices, control.pipes)
        self._servers: tuple[Server, ...] = ()
        self.is_ours = False
        """Whether it is ours to end."""
        self._is_found = False

    @classmethod
    def of(cls, one: DeviceSet, program: Path, settings: MpsConfig) -> "Daemon":
        """Returns the daemon of a set of devices, not started yet."""
        return cls(Control(program, one.pipes, one.logs), one.devices, settings)

    @property
    def _mark(self) -> Path:
        return self._control.pipes / _MARK

    async def start(self) -> None:
        """Uses the daemon that answers, else starts one, and waits until it answers.

        Raises:
            MpsUnavailable: It ended, did not answer in time, or cannot be started.
            ConfigError: The compute mode was to be changed and cannot be.
        """
        found = await asyncio.to_thread(self._control.servers)
        if found is not None and self._serves_others():
            await self._end_others()
            found = None
        if found is None:
            await self._start()
            found = await self._answered()
        else:
            # Behind our own directory it is what a killed supervisor has left.
            self._is_found, self.is_ours = True, self._mark.exists()
            _log.info("mps_found", pipes=str(self._control.pipes), ours=self.is_ours)
        if not found and not await asyncio.to_thread(self._control.start_server):
            _log.warning("mps_server_not_started", effect="the first client starts it")
        now = await asyncio.to_thread(self._control.servers)
        self._servers = now or ()

    def _serves_others(self) -> bool:
        """Whether a daemon of ours was left that has other devices than are meant now:
        numbers of settings follow CUDA_VISIBLE_DEVICES.
        """
        try:
            left = msgspec.json.decode(self._mark.read_bytes(), type=list[str])
        except (OSError, msgspec.DecodeError):
            return False
        return left != [device.id for device in self._devices]

    async def _end_others(self) -> None:
        _log.info("mps_replaced", pipes=str(self._control.pipes))
        await asyncio.to_thread(self._control.quit, _QUIT_S)
        end = time.monotonic() + _QUIT_S
        while await asyncio.to_thread(self._control.servers) is not None:
            if time.monotonic() > end:
                raise MpsUnavailable(
                    f"the daemon behind {self._control.pipes} serves other devices and "
                    "does not quit; end it"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    def _make_directories(self) -> None:
        for directory in (self._control.pipes, self._control.logs):
            try:
                if directory is not None:
                    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise MpsUnavailable(
                    f"{directory} cannot be made: {error.strerror}; give another "
                    "pool.state_dir"
                ) from error

    async def _start(self) -> None:
        control = self._control
        self._make_directories()
        # Without being told to, what a killed process left is given back.
        change = (
            self._modes.exclude if self._settings.exclusive else self._modes.restore
        )
        await asyncio.to_thread(change)
        ids = [device.id for device in self._devices]
        self._mark.write_bytes(msgspec.json.encode(ids))
        self.is_ours = True
        try:
            # On this thread: the kernel ties the child's end to the one that forked.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [str(control.program), "-f"],
                env={**control.environment(), **daemon_environment(self._devices)},
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        except OSError as error:
            raise MpsUnavailable(
                f"{control.program} cannot be run: {error.strerror}"
            ) from error
        _log.info("mps_started", pid=self._process.pid, pipes=str(control.pipes))

    async def _answered(self) -> tuple[Server, ...]:
        end = time.monotonic() + self._settings.start_s
        while time.monotonic() < end:
            if self._ended():
                raise MpsUnavailable(self._why_ended())
            found = await asyncio.to_thread(self._control.servers)
            if found is not None:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)
        raise MpsUnavailable(
            f"the MPS daemon behind {self._control.pipes} did not answer within "
            f"mps.start_s={self._settings.start_s:g} s; {self._log_hint()}"
        )

    async def watch(self) -> str:
        """Returns when the daemon is gone, and says why; logs what its servers do."""
        silent = 0
        while True:
            await asyncio.sleep(self._settings.check_s)
            if self._ended():
                return self._why_ended()
            now = await asyncio.to_thread(self._control.servers)
            # Once may be a machine that is busy.
            silent = silent + 1 if now is None else 0
            if silent > 1:
                return "the MPS daemon does not answer"
            if now is not None:
                self._note(now)
            if now == ():
                await asyncio.to_thread(self._control.start_server)

    def _note(self, now: tuple[Server, ...]) -> None:
        if now == self._servers:
            return
        trouble = lost(self._servers, now)
        shown = [f"{server.pid} {server.status}" for server in now]
        if trouble is not None:
            _log.error("mps_server_lost", reason=trouble, servers=shown)
        else:
            _log.info("mps_servers", servers=shown)
        self._servers = now

    async def stop(self) -> None:
        """Ends the daemon if it is ours; one that was found goes on."""
        if not self.is_ours:
            if self._is_found:
                _log.info("mps_left_alone", pipes=str(self._control.pipes))
            return
        try:
            if not self._ended():
                await asyncio.to_thread(self._control.quit, _QUIT_S)
                await asyncio.to_thread(self._end_process)
        finally:
            with contextlib.suppress(OSError):
                self._mark.unlink(missing_ok=True)
            await asyncio.to_thread(self._modes.restore)
        _log.info("mps_stopped")

    def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        for end in (None, process.terminate, process.kill):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_QUIT_S)
                return
        _log.error("mps_does_not_end", pid=process.pid)

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _why_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        return f"the MPS daemon ended with exit code {code}; {self._log_hint()}"

    def _log_hint(self) -> str:
        logs = self._control.logs or "the directory of its logs"
        return f"control.log and server.log in {logs} may say why"


async def keep(daemon: Daemon, stopping: asyncio.Event) -> str | None:
    """Runs a daemon until it is told to stop.

    Args:
        daemon: Not started yet.
        stopping: Set by a signal.

    Returns:
        None after a stop, else why the daemon is gone.

    Raises:
        MpsUnavailable: It cannot be started.
    """
    told = asyncio.create_task(stopping.wait())
    work = asyncio.create_task(_serve(daemon))
    try:
        await asyncio.wait({told, work}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        await end_tasks(told, work)
        await daemon.stop()


async def _serve(daemon: Daemon) -> str | None:
    await daemon.start()
    _log.info("mps_ready", ours=daemon.is_ours)
    return await daemon.watch()
