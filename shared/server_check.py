"""Judging a Redis server: what an operator should know, and what rules it out."""

import re
from typing import Final, cast

import redis.asyncio
from redis import exceptions

from .errors import RedisUnavailable, RedisUnsuitable
from .keys import SHARDS
from .redis import Finding, translate

OLDEST_VERSION: Final = (6, 2)
"""XADD NOMKSTREAM and ZRANGEBYSCORE in scripts as we use them came with 6.2."""

_NEARLY: Final = 0.9
_TRIAL: Final = (
    "redis.call('PUBLISH', 'tm:trial', '') return redis.call('EXISTS', KEYS[1])"
)
_LAST_WRITES: Final = {
    "rdb_last_bgsave_status": "snapshot",
    "aof_last_write_status": "append-only file",
}


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


def _loading_finding(info: dict[str, object]) -> list[Finding]:
    if str(info.get("loading", "0")) == "0":
        return []
    left = info.get("loading_eta_seconds", "unknown")
    message = f"the server is loading its data; {left} s left by its own estimate"
    return [Finding("warning", "loading", message, "wait; nothing else is needed")]


def _memory_finding(info: dict[str, object]) -> Finding:
    used, most = (int(str(info.get(k, 0))) for k in ("used_memory", "maxmemory"))
    text = f"{used / 2**20:.0f} MiB used"
    if not most:
        return Finding("info", "memory", f"{text}, no maxmemory")
    text = f"{text} of {most / 2**20:.0f} MiB (maxmemory)"
    cure = (
        "raise maxmemory, shorten retention.result_s, lower limits.max_waiting_bytes, "
        "or set storage.url so that large inputs go elsewhere"
    )
    if used >= most:
        return Finding(
            "error", "memory", f"{text}: full, new jobs and tokens are refused", cure
        )
    if used >= _NEARLY * most:
        return Finding("warning", "memory", f"{text}: nearly full", cure)
    return Finding("info", "memory", text)


def _clients_finding(info: dict[str, object]) -> Finding:
    now, most = (int(str(info.get(k, 0))) for k in ("connected_clients", "maxclients"))
    text = f"{now} of {most} connections" if most else f"{now} connections"
    if most and now >= _NEARLY * most:
        cure = "CONFIG SET maxclients, or close idle clients; more are refused"
        return Finding("warning", "clients", f"{text}: nearly all are taken", cure)
    return Finding("info", "clients", text)


def _disk_finding(info: dict[str, object]) -> list[Finding]:
    failed = [
        what
        for field, what in _LAST_WRITES.items()
        if str(info.get(field, "ok")) != "ok"
    ]
    if not failed:
        return []
    return [
        Finding(
            "error",
            "disk",
            f"Redis could not write its {' and '.join(failed)}: it may refuse writes, "
            "and a restart loses what came since",
            "free disk space or mend the permissions of its directory (CONFIG GET dir)",
        )
    ]


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
        *_loading_finding(info),
        _policy_finding(info),
        _memory_finding(info),
        _clients_finding(info),
        _persistence_finding(info, settings),
        *_disk_finding(info),
    ]


async def require_usable(client: redis.asyncio.Redis, *, serving: bool = False) -> None:
    """Refuses a server that can never serve: too old, or a replica.

    One that is still loading its data answers here; it will be there. Eviction and
    persistence are for an operator to judge: `check_server` and `tokenmill doctor`.

    Args:
        client: As from `connect`.
        serving: Also try what a part of the pool cannot do without: it would wait for
            ever for a permission, where a producer's first command says it.

    Raises:
        RedisUnavailable: No answer.
        RedisUnsuitable: It can never serve, or refuses us.
    """
    with translate():
        try:
            info = cast("dict[str, object]", await client.info())
        except exceptions.NoPermissionError:
            # Not every user may ask; what it may do shows with the first command.
            await client.ping()
            return
    for found in (_version_finding(info), _role_finding(info)):
        if found.severity == "error":
            raise RedisUnsuitable(f"{found.message}; {found.cure}")
    if serving and not _loading_finding(info):
        with translate():
            await client.eval(_TRIAL, 1, SHARDS)  # type: ignore[misc]
