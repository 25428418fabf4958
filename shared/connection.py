"""Finding a pool: an explicit URL, the environment, the settings, or the file that
`tokenmill up` leaves for its own user.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from .config import Config
from .config_load import load_config
from .errors import RedisUnavailable

FILE_NAME: Final = "pool.json"
LOCK_NAME: Final = "pool.lock"
"""Held locked by `tokenmill up` for as long as it lives."""


class ConnectionFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `pool.json` holds; readable by its owner alone, for it has the password."""

    v: int = 1
    url: str
    pid: int
    """Of the supervising process."""
    redis_pid: int | None = None
    """Of the embedded server; None when the pool was given a URL."""


def state_dir(config: Config, environ: Mapping[str, str] | None = None) -> Path:
    """Returns the directory of the pool's data, logs and connection file."""
    if config.pool.state_dir is not None:
        return Path(config.pool.state_dir).expanduser().absolute()
    variables = os.environ if environ is None else environ
    base = variables.get("XDG_STATE_HOME")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return (root / "tokenmill").absolute()


def write_connection(directory: Path, connection: ConnectionFile) -> Path:
    """Writes `pool.json` with mode 0600, replacing an earlier one in one step."""
    path = directory / FILE_NAME
    draft = directory / f".{FILE_NAME}.{os.getpid()}"
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.encode(connection))
    draft.replace(path)
    return path


def read_connection(directory: Path) -> ConnectionFile | None:
    """Returns the connection of a pool that lives, or None when there is none.

    Raises:
        RedisUnavailable: The file is not private to this user, or cannot be read.
    """
    path = directory / FILE_NAME
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RedisUnavailable(f"cannot read {path}: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        _require_private(path, os.fstat(file.fileno()))
        raw = file.read()
    try:
        connection = msgspec.json.decode(raw, type=ConnectionFile)
    except msgspec.DecodeError as error:
        raise RedisUnavailable(
            f"{path} is not a connection file ({error}); remove it and start the "
            "pool again with: tokenmill up"
        ) from error
    return connection if is_alive(connection.pid) else None


def _require_private(path: Path, status: os.stat_result) -> None:
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise RedisUnavailable(
            f"{path} belongs to user id {status.st_uid}, not to you; not trusting it. "
            "Give the pool's address with --url or TOKENMILL_URL"
        )
    if os.name == "posix" and stat.S_IMODE(status.st_mode) & 0o077:
        raise RedisUnavailable(
            f"{path} can be read or written by others "
            f"(mode {stat.S_IMODE(status.st_mode):o}, expected 600); not trusting it. "
            "Remove it and start the pool again"
        )


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find_pool(url: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Returns the URL of the pool's Redis.

    Looks at `url`, then `TOKENMILL_URL`, then the setting `redis.url`, then the
    connection file of a pool that `tokenmill up` runs here.

    Args:
        url: An explicit address; None to search.
        environ: Environment variables; None takes the process's own.

    Raises:
        RedisUnavailable: No pool was found; the message says how to start one.
        ConfigError: The settings cannot be read.
    """
    if url:
        return url
    variables = os.environ if environ is None else environ
    named = variables.get("TOKENMILL_URL")
    if named:
        return named
    config = load_config(None, variables).config
    if config.redis.url:
        return config.redis.url
    directory = state_dir(config, variables)
    connection = read_connection(directory)
    if connection is not None:
        return connection.url
    raise RedisUnavailable(
        f"no pool found: no URL was given, TOKENMILL_URL and redis.url are unset, and "
        f"no pool runs with state directory {directory}. Start one with: tokenmill up"
    )
