"""Connecting to Redis, judging the server, and turning its errors into ours."""

import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeVar

import msgspec
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from .errors import ConfigError, RedisUnavailable, RedisUnsuitable
from .redis_connection import make_cancellable

_HEALTH_CHECK_S: Final = 15
"""An idle connection is pinged before use after this long."""
_RETRIES: Final = 3
_BACKOFF_BASE_S: Final = 0.05
_BACKOFF_CAP_S: Final = 1.0
_PASSWORD: Final = re.compile(r"(?P<head>//[^@:\s]*:)\S*(?=@)")
"""Up to the last @: a password may hold what should have been percent-encoded."""
_QUERY_PASSWORD: Final = re.compile(r"(?i)([?&](?:password|username)=)[^&\s]*")
_SERVER_SAYS: Final = re.compile(
    r"(?:^|-|: )(OOM|READONLY|MISCONF|NOPERM|NOREPLICAS|LOADING|BUSY|MASTERDOWN)\b"
)
_COMES_BACK: Final = ("LOADING", "CLUSTERDOWN", "MASTERDOWN", "BUSY ")
"""A server that says so serves again by itself."""
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
        # Nothing to be said at the greeting: a server that has no room for clients is
        # then heard, and Redis 6.2 does not know the command.
        "lib_name": None,
        "lib_version": None,
        "decode_responses": False,
        "max_connections": max_connections,
        "timeout": socket_timeout_s,
    }
    if not url.startswith("unix:"):
        options |= {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(url, **options)
    except (ValueError, TypeError):
        # The parser's own words may hold a part of the password.
        raise ConfigError(
            "redis.url",
            f"'{redact_url(url)}' is not a Redis URL; expected "
            "redis://[user:password@]host[:port][/db], rediss://… or unix://…, with "
            "each / ? # @ of a user or password percent-encoded (%2F %3F %23 %40)",
        ) from None
    make_cancellable(pool)
    return redis.asyncio.Redis.from_pool(pool)


def server_says(text: str) -> str | None:
    """Returns the word by which Redis refuses whatever it is asked, if there is one.

    An error that a script met names it in its midst; Redis 6.2 does so always.

    Args:
        text: Of an error reply.
    """
    match = _SERVER_SAYS.search(text)
    return match[1] if match else None


def _unsuitable(error: exceptions.RedisError) -> str | None:
    """What is wrong with the server when the error names it, with the cure."""
    text = str(error)
    said = server_says(text)
    if isinstance(error, exceptions.OutOfMemoryError) or said == "OOM":
        return (
            "Redis is out of memory and refuses writes; raise its maxmemory, "
            "or shorten retention.result_s so that results leave sooner"
        )
    if isinstance(error, exceptions.ReadOnlyError) or said == "READONLY":
        return (
            "this Redis is a read-only replica; give the URL of the primary, "
            "or promote it with REPLICAOF NO ONE"
        )
    if said == "MISCONF":
        return (
            "Redis cannot save to disk and refuses writes; "
            "free disk space or check the permissions of its directory"
        )
    if said == "NOREPLICAS":
        return (
            "Redis has fewer replicas in step than its min-replicas-to-write and "
            "refuses writes; bring them back, or lower the setting"
        )
    if isinstance(error, exceptions.NoPermissionError) or said == "NOPERM":
        return (
            "this Redis user lacks a permission; use the URL of a role that has it "
            "(deploy/redis/users.acl says which may what), or where one user serves "
            "all, grant it keys and channels 'tm:*', +@all or at least +@scripting "
            f"+@read +@write +@pubsub ({text})"
        )
    if isinstance(error, exceptions.AuthenticationError) or any(
        word in text for word in ("NOAUTH", "WRONGPASS", "Authentication required")
    ):
        return (
            "Redis refused the user or password; set them in the URL: "
            "redis://user:password@host:port/0"
        )
    if isinstance(error, exceptions.DataError):
        return f"Redis was not asked: {text}"
    return None


def _absence(where: str, text: str) -> str:
    """What to say of a server that does not serve now and may do so later."""
    if "max number of clients" in text:
        return (
            f"{where} has no room for another connection (maxclients reached); close "
            "idle clients, or raise it: CONFIG SET maxclients"
        )
    if text.startswith("BUSY "):
        return f"{where} is busy with one long script; try again in a while"
    if "loading" in text.lower():
        return f"{where} is still loading its data; try again in a while"
    return (
        f"{where} did not answer ({redact_url(text)}); "
        "check that the server runs and that the URL is right"
    )


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
        ) or str(error).startswith(_COMES_BACK):
            raise RedisUnavailable(_absence(where, str(error))) from error
        raise RedisUnsuitable(
            f"{where} refused a command: {redact_url(str(error))}"
        ) from error
    except (OSError, TimeoutError) as error:
        raise RedisUnavailable(
            f"{where} could not be reached ({error}); "
            "check that the server runs and that the URL is right"
        ) from error
