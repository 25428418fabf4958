"""Keeps the adapters of a model registered, should Redis lose them."""

import time
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import structlog

from ..shared.adapter_keys import adapters_key, mark_key
from ..shared.adapters import RETIRED_MS, AdapterCard, key_of
from ..shared.adapters_mark import is_lost, next_mark
from ..shared.adapters_registry import AdapterRegistry, Entries, Writes, decoded
from ..shared.errors import ProtocolError

if TYPE_CHECKING:
    import redis.asyncio

READ_AGAIN_S: Final = 60.0
"""A producer of a former release changes the registry and not its mark."""
_log = structlog.get_logger(__name__)


class AdapterKeeper:
    """Remembers the registry of a model's adapters.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
    """

    def __init__(self, client: "redis.asyncio.Redis", model: str) -> None:
        self._redis = client
        self._model = model
        self._registry = AdapterRegistry(client, model)
        self._read_at = float("-inf")
        self._mark: bytes | None = None
        self._entries: Entries = {}

    async def follow(self) -> None:
        """Reads the registry where it has changed; writes again what has been lost.

        Raises:
            ProtocolError: The mark, or an entry that was to be written, is not ours.
        """
        mark = await self._redis.get(mark_key(self._model))
        begun = time.monotonic()
        if mark == self._mark and begun - self._read_at < READ_AGAIN_S:
            return
        is_short = self._mark is not None and is_lost(self._mark, mark)
        restored = partial(_restored, self._entries)
        if is_short and await self._registry.change(restored):
            _log.warning("adapters_written_again", model=self._model)
        self._mark, self._entries = await self._read()
        self._read_at = begun

    async def _read(self) -> tuple[bytes | None, Entries]:
        mark, entries = await self._read_once()
        if mark is None and entries:  # of a release that made no marks
            first = next_mark(None)
            await self._redis.set(mark_key(self._model), first, nx=True)
            mark, entries = await self._read_once()
        return mark, entries

    async def _read_once(self) -> tuple[bytes | None, Entries]:
        pipe = self._redis.pipeline(transaction=True)
        pipe.get(mark_key(self._model))
        pipe.hgetall(adapters_key(self._model))
        return cast("tuple[bytes | None, Entries]", tuple(await pipe.execute()))


def _restored(seen: Entries, found: Entries, now_ms: int) -> tuple[bool, Writes]:
    """Decides what of a registry to write again; whether there is anything.

    A name that others have by now stays theirs, and what was removed stays so: its card
    is there still, or was removed too long ago to matter.
    """
    writes: Writes = {}
    for field, raw in seen.items():
        card = None if field in found else _card(raw)
        if card is None:
            continue  # it is there; or it never could be read, and somebody mended that
        current = _card(found.get(card.name.encode(), b""))
        if card.retired is None:
            is_gone = f"@{key_of(card.ref)}".encode() in found
        else:
            is_old = (card.retired_ms or 0) < now_ms - RETIRED_MS
            is_gone = is_old or (current is not None and current.digest == card.digest)
        if not is_gone:
            writes[field.decode()] = raw
    return bool(writes), writes


def _card(raw: bytes) -> AdapterCard | None:
    try:
        return decoded(raw, "the registry")
    except ProtocolError:
        return None
