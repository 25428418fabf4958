"""Removing inputs from the store once no job's record names them any more."""

import asyncio
from typing import Final, cast

import msgspec
import redis.asyncio
import structlog

from ..shared.config import Config
from ..shared.errors import StorageUnavailable
from ..shared.input_refs import MOST_PAYLOAD_BYTES
from ..shared.keys import INPUTS, POOL
from ..shared.messages import PoolCard
from ..shared.storage import Storage

SCAN_COUNT: Final = 500
SCAN_PAUSE_S: Final = 0.01
"""Between two parts of a scan: the queue comes first."""
_MARK: Final = b'"text_ref"'
_log = structlog.get_logger(__name__)


class _Named(msgspec.Struct):
    name: str


class _Request(msgspec.Struct):
    """Of a request of any version, what decides here."""

    text_ref: _Named | None = None


async def remove_old(client: "redis.asyncio.Redis", config: Config) -> int:
    """Removes inputs that are old and named by no job; a job's end is never before.

    Age alone removes nothing: a job may wait for weeks. That no record names an input
    does not either, while it is young: its job may be about to be enqueued.

    Args:
        client: Redis.
        config: Whether there is a store, and what is old.

    Returns:
        How many were removed.
    """
    url = await _published(client)
    if config.storage.url is None or url is None:
        return 0
    store = None
    try:
        most = config.storage.max_input_bytes
        store = await Storage.opened(url, max_bytes=most)
        # Ages are differences of the store's own clock.
        before_s = await store.probe() - config.storage.keep_s
        old = {one.name for one in await store.inputs() if one.modified_s < before_s}
        if old:
            old -= await _named(client)
        # Whoever sends an input again renews it, and it stays.
        gone = [await store.remove(name, before_s) for name in sorted(old)]
    except StorageUnavailable as error:
        _log.error("storage_unavailable", error=str(error))
        return 0
    finally:
        if store is not None:
            store.close()
    return sum(gone)


async def _published(client: "redis.asyncio.Redis") -> str | None:
    """The address that producers were told: a directory of this pool alone."""
    raw = await client.get(POOL)
    try:
        return (
            None if raw is None else msgspec.json.decode(raw, type=PoolCard).storage_url
        )
    except msgspec.DecodeError as error:
        _log.error("pool_card_unreadable", error=str(error))
        return None


async def _named(client: "redis.asyncio.Redis") -> set[str]:
    """Returns the inputs that records name, ended jobs included, of all shards.

    Also of those that a flush took out of `tm:shards`: what this misses is removed.
    """
    found: set[str] = set()
    cursor = 0
    while True:
        cursor, names = await client.scan(cursor, match=INPUTS, count=SCAN_COUNT)
        for payload in await _payloads(client, names):
            if payload is not None and _MARK in payload:
                found |= _ref(payload)
        if not cursor:
            return found
        await asyncio.sleep(SCAN_PAUSE_S)


async def _payloads(
    client: "redis.asyncio.Redis", names: list[bytes]
) -> list[bytes | None]:
    """Payloads that may name an input: those are small."""
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.strlen(name)
    sizes = await pipe.execute(raise_on_error=False)
    small = [
        name
        for name, size in zip(names, sizes, strict=True)
        if isinstance(size, int) and 0 < size <= MOST_PAYLOAD_BYTES
    ]
    return cast("list[bytes | None]", await client.mget(small)) if small else []


def _ref(payload: bytes) -> set[str]:
    try:
        ref = msgspec.json.decode(payload, type=_Request).text_ref
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()  # no such job can run
    return set() if ref is None else {ref.name}
