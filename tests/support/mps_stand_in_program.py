"""A stand-in for NVIDIA's MPS control program, for tests without a GPU.

It is not MPS. It speaks the part of the control program's command interface that
tokenmill uses, as NVIDIA documents it: `-f` and `-d` start a daemon that listens on
`control` in CUDA_MPS_PIPE_DIRECTORY; without an option commands are read from standard
input, one a line, and the answers printed. Its servers are processes that end with it.

Three commands are the stand-in's own, for tests: `stand_in_fault <pid>` puts a server
into the state FAULT, as a fatal error of a client does, and `stand_in_recover <pid>`
ends that, as the end of all its clients does, whom it does not know. `stand_in_seen`
prints the environment that the daemon was started with.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn


class _Daemon:
    def __init__(self, pipes: Path) -> None:
        self._pipes = pipes
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._faulty: set[int] = set()
        self._quitting = False

    def serve(self) -> None:
        """Answers until it is told to quit."""
        address = self._pipes / "control"
        if _connect(address) is not None:
            raise SystemExit("An instance of this daemon is already running")
        address.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        # Whoever sees the file can connect at once.
        early = address.with_suffix(".new")
        listener.bind(str(early))
        listener.listen()
        early.rename(address)
        _log(f"Starting control daemon using socket {address}")
        try:
            while not self._quitting:
                peer, _ = listener.accept()
                # Who only looks whether somebody listens is gone again.
                with contextlib.suppress(OSError), peer, peer.makefile("rw") as stream:
                    stream.write(self._answer(stream.readline().split()))
        finally:
            for server in self._servers.values():
                server.kill()
                server.wait()
            address.unlink(missing_ok=True)

    def _answer(self, words: list[str]) -> str:
        _log(" ".join(words))
        alive = [pid for pid, s in self._servers.items() if s.poll() is None]
        match words:
            case ["get_server_list"]:
                return "".join(f"{pid}\n" for pid in alive)
            case ["get_server_status", pid]:
                if int(pid) not in alive:
                    return "Server not found\n"
                return "FAULT\n" if int(pid) in self._faulty else "ACTIVE\n"
            case ["get_client_list", _]:
                return ""
            case ["start_server", "-uid", _]:
                server = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
                self._servers[server.pid] = server
                return ""
            case ["stand_in_fault" | "stand_in_recover" as what, pid]:
                changes = {"fault": self._faulty.add, "recover": self._faulty.discard}
                changes[what.rpartition("_")[2]](int(pid))
                return ""
            case ["stand_in_seen"]:
                wanted = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
                return json.dumps({name: os.environ.get(name) for name in wanted})
            case ["get_default_active_thread_percentage"]:
                return "100.0\n"
            case ["quit", *_]:
                self._quitting = True
                return ""
            case _:
                return f"unknown command: {' '.join(words)}\n"


def _log(text: str) -> None:
    directory = os.environ.get("CUDA_MPS_LOG_DIRECTORY")
    if directory:
        with (Path(directory) / "control.log").open("a") as file:
            file.write(f"[{time.time():.3f} Control {os.getpid()}] {text}\n")


def _connect(address: Path) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(str(address))
    except OSError:
        peer.close()
        return None
    return peer


def _command_line(address: Path) -> int:
    for command in sys.stdin:
        peer = _connect(address)
        if peer is None:
            sys.stdout.write("Cannot find MPS control daemon process\n")
            return 1
        with peer, peer.makefile("rw") as stream:
            stream.write(command)
            stream.flush()
            sys.stdout.write(stream.read())
    return 0


def _main() -> int:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nowhere"))
    if sys.argv[1:] == ["-d"]:
        subprocess.Popen([sys.executable, __file__, "-f"], start_new_session=True)
        return 0
    if sys.argv[1:] != ["-f"]:
        return _command_line(pipes / "control")

    def end(*_: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    _Daemon(pipes).serve()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
