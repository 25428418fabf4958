"""The command interface of an MPS control daemon, as its own program speaks it."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from ..shared.mps import LOGS, PIPES

_TIMEOUT_S: Final = 5.0
_ADDRESS: Final = re.compile(r"^\d+$")
ACTIVE: Final = "ACTIVE"
FAULT: Final = "FAULT"
"""After a fatal error of one client, until all clients of its devices are gone."""
_log = structlog.get_logger(__name__)


class Server(msgspec.Struct, frozen=True):
    """One server of a daemon."""

    pid: int
    status: str
    """INITIALIZING, ACTIVE, FAULT, or what the daemon says instead."""


class Control:
    """Asks a daemon; each question is a short run of the control program.

    Args:
        program: nvidia-cuda-mps-control.
        pipes: The daemon's directory.
        logs: Where it logs; only a daemon that is started reads it.
    """

    def __init__(self, program: Path, pipes: Path, logs: Path | None = None) -> None:
        self.program = program
        self.pipes = pipes
        self.logs = logs

    def environment(self) -> dict[str, str]:
        """Returns the environment in which the program finds the daemon."""
        told = {**os.environ, PIPES: str(self.pipes)}
        if self.logs is not None:
            told[LOGS] = str(self.logs)
        return told

    def ask(self, command: str, timeout_s: float = _TIMEOUT_S) -> str | None:
        """Returns what the daemon answers, or None if it does not.

        Args:
            command: One command of its interface.
            timeout_s: After this long there is no answer.
        """
        try:
            asked = subprocess.run(
                [str(self.program)],
                input=f"{command}\n",
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.debug("mps_silent", command=command, error=repr(error))
            return None
        if asked.returncode:
            said = (asked.stdout + asked.stderr).strip()
            _log.debug("mps_silent", command=command, said=said[:200])
            return None
        return asked.stdout.strip()

    def servers(self) -> tuple[Server, ...] | None:
        """Returns the daemon's servers with their status, or None without an answer."""
        listed = self.ask("get_server_list")
        if listed is None:
            return None
        pids = [int(word) for word in listed.split() if _ADDRESS.match(word)]
        return tuple(Server(pid, self._status(pid)) for pid in pids)

    def _status(self, pid: int) -> str:
        said = self.ask(f"get_server_status {pid}")
        words = (said or "").upper().split()
        return words[-1] if words else "UNKNOWN"

    def clients(self, server: Server) -> tuple[int, ...]:
        """Returns the process ids of a server's clients."""
        said = self.ask(f"get_client_list {server.pid}")
        return tuple(int(word) for word in (said or "").split() if _ADDRESS.match(word))

    def start_server(self) -> bool:
        """Starts this user's server ahead of its first client.

        Returns:
            Whether the daemon took the command. Without it the first client starts one.
        """
        return self.ask(f"start_server -uid {os.getuid()}", timeout_s=30.0) is not None

    def quit(self, wait_s: float) -> bool:
        """Ends the daemon and its servers.

        Args:
            wait_s: Servers that still have clients after this long are ended as well.

        Returns:
            Whether it took the command.
        """
        command = f"quit -t {max(1, round(wait_s))}"
        return self.ask(command, timeout_s=wait_s + 10.0) is not None


def takes_clients(servers: Sequence[Server] | None) -> bool:
    """Whether a daemon answers and no server of it waits for the end of its clients."""
    return servers is not None and all(one.status != FAULT for one in servers)


def lost(before: Sequence[Server], now: Sequence[Server] | None) -> str | None:
    """Returns why the servers of a moment ago serve no more, or None.

    Args:
        before: As last seen.
        now: As seen now; None: the daemon did not answer.
    """
    if now is None:
        return "the MPS daemon does not answer"
    for server in now:
        if server.status == FAULT:
            return (
                f"the MPS server {server.pid} met a fatal error of one of its clients, "
                "which ends all of them"
            )
    gone = {server.pid for server in before} - {server.pid for server in now}
    if gone:
        return f"the MPS server {min(gone)} ended"
    return None
