"""Connecting to Redis, judging the server, and turning its errors into ours."""

import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeVar, cast

import msgspec
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from .errors import ConfigError, RedisUnavailable, RedisUnsuitable
from .redis_connection import make_cancellable

OLDEST_VERSION: Final = (6, 2)
"""XADD NOMKSTREAM and ZRANGEBYSCORE in scripts as we use them came with 6.2."""
_HEALTH_CHECK_S: Final = 15
"""An idle connection is pinged before use after this long."""
_RETRIES: Final = 3
_BACKOFF_BASE_S: Final = 0.05
_BACKOFF_CAP_S: Final = 1.0
_PASSWORD: Final = re.compile(r"(?P<head>//[^/?#@]*?:)[^/?#]*(?=@)")
_QUERY_PASSWORD: Final = re.compile(r"(?i)([?&](?:password|username)=)[^&#]*")
_KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}
"""A peer that vanished is noticed after a minute; where the system can set it."""


class Finding(msgspec.Struct, frozen=True):
    """Something about the server that an operator should know."""

    severity: Literal["error", "warning", "info"]
    """error: tokenmill cannot work with it; warning: jobs may be lost."""
    name: str
    message: str
    cure: str = ""
    """What to do, empty when nothing is wrong."""


_T = TypeVar("_T")


class _Retry(Retry):
    """Retries what may heal by itself. redis-py files a wrong password under
    connection errors; retried at every level, it would be said after minutes.
    """

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[_T]],
        fail: Callable[[exceptions.RedisError], Awaitable[object]],
    ) -> _T:
        """Runs `do`, and again after a failure unless the server refused us."""

        async def clean_up(error: exceptions.RedisError) -> None:
            await fail(error)
            if isinstance(
                error, exceptions.AuthenticationError | exceptions.AuthorizationError
            ):
                raise error

        return await super().call_with_retry(do, clean_up)


def redact_url(url: str) -> str:
    """Returns `url` with its password replaced, fit for logs and messages."""
    return _QUERY_PASSWORD.sub(r"\1***", _PASSWORD.sub(r"\g<head>***", url))


def connect(
    url: str, *, socket_timeout_s: float = 5.0, max_connections: int = 64
) -> redis.asyncio.Redis:
    """Returns a client for `url`; it connects when first used.

    Args:
        url: redis://, rediss:// or unix://, with user and password where needed.
        socket_timeout_s: Longest wait for a connection or a reply.
        max_connections: Size of the connection pool; further callers wait.

    Raises:
        ConfigError: `url` is not a Redis URL.
    """
    backoff = ExponentialBackoff(cap=_BACKOFF_CAP_S, base=_BACKOFF_BASE_S)
    retry = _Retry(backoff, _RETRIES)
    options: dict[str, object] = {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": socket_timeout_s,
        "health_check_interval": _HEALTH_CHECK_S,
        "retry": retry,
        "retry_on_error": [exceptions.ConnectionError, exceptions.TimeoutError],
        "protocol": 2,
        "decode_responses": False,
        "max_connections": max_connections,
        "timeout": socket_timeout_s,
    }
    if not url.startswith("unix:"):
        options |= {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "redis.url",
            f"'{redact_url(url)}' is not a Redis URL ({redact_url(str(error))}); "
            "expected redis://[user:password@]host[:port][/db], rediss://… or unix://…",
        ) from None
    make_cancellable(pool)
    return redis.asyncio.Redis.from_pool(pool)


def _unsuitable(error: exceptions.RedisError) -> str | None:
    """What is wrong with the server when the error names it, with the cure."""
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text[:40]:
        return (
            "Redis is out of memory and refuses writes; raise its maxmemory, "
            "or shorten retention.result_s so that results leave sooner"
        )
    if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in text[:40]:
        return (
            "this Redis is a read-only replica; give the URL of the primary, "
            "or promote it with REPLICAOF NO ONE"
        )
    if "MISCONF" in text[:40]:
        return (
            "Redis cannot save to disk and refuses writes; "
            "free disk space or check the permissions of its directory"
        )
    if isinstance(error, exceptions.NoPermissionError) or "NOPERM" in text[:40]:
        return (
            "this Redis user lacks a permission; grant keys and channels 'tm:*', "
            f"+@all or at least +@scripting +@read +@write +@pubsub ({text})"
        )
    if isinstance(error, exceptions.AuthenticationError) or any(
        word in text for word in ("NOAUTH", "WRONGPASS", "Authentication required")
    ):
        return (
            "Redis refused the user or password; set them in the URL: "
            "redis://user:password@host:port/0"
        )
    if isinstance(error, exceptions.DataError) or "max number of clients" in text:
        return f"Redis refused the connection: {text}"
    return None


@contextmanager
def translate(where: str = "Redis") -> Iterator[None]:
    """Turns errors of the Redis library raised inside into ours.

    Args:
        where: What was being talked to, for the message.

    Raises:
        RedisUnavailable: No connection, no reply in time, or still loading.
        RedisUnsuitable: The server answers but refuses: memory, replica, password.
    """
    try:
        yield
    except exceptions.RedisError as error:
        problem = _unsuitable(error)
        if problem is not None:
            raise RedisUnsuitable(problem) from error
        if isinstance(
            error,
            exceptions.ConnectionError | exceptions.TimeoutError,
        ) or str(error).startswith(("LOADING", "CLUSTERDOWN", "MASTERDOWN")):
            raise RedisUnavailable(
                f"{where} did not answer ({redact_url(str(error))}); "
                "check that the server runs and that the URL is right"
            ) from error
        raise RedisUnsuitable(
            f"{where} refused a command: {redact_url(str(error))}"
        ) from error
    except (OSError, TimeoutError) as error:
        raise RedisUnavailable(
            f"{where} could not be reached ({error}); "
            "check that the server runs and that the URL is right"
        ) from error


async def _settings(client: redis.asyncio.Redis, *names: str) -> dict[str, str] | None:
    """CONFIG GET, or None where the provider forbids it."""
    found: dict[str, str] = {}
    try:
        for name in names:
            reply = await client.config_get(name)
            for key, value in cast("dict[bytes, bytes]", reply).items():
                found[_text(key)] = _text(value)
    except exceptions.ResponseError:
        return None
    return found


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _version_finding(info: dict[str, object]) -> Finding:
    version = str(info.get("redis_version", "unknown"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    needed = ".".join(map(str, OLDEST_VERSION))
    if numbers < OLDEST_VERSION:
        return Finding(
            "error",
            "version",
            f"Redis {version} is too old; {needed} or newer is needed",
            f"install Redis {needed} or newer, or Valkey",
        )
    return Finding("info", "version", f"Redis {version}")


def _role_finding(info: dict[str, object]) -> Finding:
    if info.get("role") == "slave":
        return Finding(
            "error",
            "role",
            "this server is a read-only replica",
            "give the URL of the primary",
        )
    return Finding("info", "role", "primary")


def _policy_finding(info: dict[str, object]) -> Finding:
    policy = str(info.get("maxmemory_policy", "unknown"))
    limited = str(info.get("maxmemory", "0")) != "0"
    if policy == "noeviction":
        return Finding("info", "maxmemory-policy", policy)
    return Finding(
        "error" if limited else "warning",
        "maxmemory-policy",
        f"maxmemory-policy is {policy}: a full server deletes waiting jobs silently",
        "CONFIG SET maxmemory-policy noeviction, and write it in redis.conf",
    )


def _persistence_finding(
    info: dict[str, object], settings: dict[str, str] | None
) -> Finding:
    if str(info.get("aof_enabled", "0")) == "1":
        fsync = (settings or {}).get("appendfsync", "unknown")
        loss = {
            "always": "a crash loses nothing that was acknowledged",
            "everysec": "a crash can lose the last second of acknowledged writes",
        }.get(fsync, "how much a crash can lose depends on the operating system")
        return Finding("info", "persistence", f"append-only file, {fsync}: {loss}")
    cure = "CONFIG SET appendonly yes (and appendfsync everysec), also in redis.conf"
    if settings is None:
        return Finding(
            "warning", "persistence", "no append-only file; CONFIG is forbidden", cure
        )
    if settings.get("save"):
        return Finding(
            "warning",
            "persistence",
            f"snapshots alone (save {settings['save']}): "
            "a crash loses jobs since the last one",
            cure,
        )
    return Finding(
        "warning", "persistence", "nothing is kept: a restart loses every job", cure
    )


async def check_server(client: redis.asyncio.Redis) -> list[Finding]:
    """Judges the server: version, role, eviction, persistence, access.

    Args:
        client: As from `connect`.

    Returns:
        What was found, good and bad. A server that cannot be asked gives one error.
    """
    try:
        with translate():
            info = cast("dict[str, object]", await client.info())
            settings = await _settings(client, "save", "appendfsync")
    except (RedisUnsuitable, RedisUnavailable) as error:
        return [Finding("error", "access", str(error), "correct the URL or the server")]
    return [
        _version_finding(info),
        _role_finding(info),
        _policy_finding(info),
        _persistence_finding(info, settings),
    ]
