"""Records of a tenant in Redis: one string each, and an index by time of creation.

The index is a set of names: a name whose record has gone is left out and removed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
import structlog
from redis.exceptions import WatchError

from ...shared.clock import time_ms
from ...shared.errors import ProtocolError
from ...shared.transactions import transaction

if TYPE_CHECKING:
    import redis.asyncio

    from ..session import Session

_PAGE: Final = 200
_ATTEMPTS: Final = 50
R = TypeVar("R", bound=msgspec.Struct)
_log = structlog.get_logger(__name__)


class OwnedRecords(Generic[R]):
    """Records of one kind.

    Args:
        session: The client's connections.
        kind: Of the records; JSON.
        record_key: Id -> name of the record.
        index_key: Tenant -> name of its index.
    """

    def __init__(
        self,
        session: "Session",
        kind: type[R],
        record_key: Callable[[str], str],
        index_key: Callable[[str], str],
    ) -> None:
        self._session = session
        self._redis: redis.asyncio.Redis = session.redis
        self._decoder = msgspec.json.Decoder(kind)
        self._record_key = record_key
        self._index_key = index_key

    async def now_ms(self) -> int:
        """Returns the time of Redis."""
        return time_ms(await self._session.patiently(self._redis.time))

    async def add(
        self,
        record_id: str,
        tenant: str,
        record: R,
        created_ms: int,
        keep_ms: int,
        *,
        replace: bool = False,
    ) -> bool:
        """Keeps a new record, and with it the tenant's index, for so long.

        Args:
            record_id: Its id.
            tenant: Whose it is.
            record: What is known.
            created_ms: Its place in the index.
            keep_ms: How long both stay.
            replace: It takes the place of one of this id.

        Returns:
            False when there is another one of this id already, which stays.
        """
        index, raw = self._index_key(tenant), msgspec.json.encode(record)
        key = self._record_key(record_id)

        async def write() -> bool:
            left_ms = await self._redis.pttl(index)
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.zadd(index, {record_id: created_ms}, nx=True)
            # Never sooner than before: a record in it may have been prolonged.
            pipeline.pexpire(index, max(keep_ms, left_ms))
            pipeline.set(key, raw, px=keep_ms, nx=not replace)
            pipeline.get(key)
            # Told by its content: an answer may be lost, and the call repeated.
            return bool((await pipeline.execute())[-1] == raw)

        return await self._session.patiently(write)

    async def get(self, record_id: str) -> R | None:
        """Returns a record, or None when there is none of this id."""
        (raw,) = await self._session.read(("GET", self._record_key(record_id)))
        return None if raw is None else self._decode(record_id, raw)

    async def get_many(self, ids: Sequence[str]) -> dict[str, R | ProtocolError | None]:
        """Returns records by id; one that cannot be read is an error in its place."""
        found: dict[str, R | ProtocolError | None] = {}
        for start in range(0, len(ids), _PAGE):
            some = ids[start : start + _PAGE]
            raws = await self._session.read_each(
                *(("GET", self._record_key(record_id)) for record_id in some)
            )
            for record_id, raw in zip(some, raws, strict=True):
                found[record_id] = self._read(record_id, raw)
        return found

    def _read(self, record_id: str, raw: object) -> R | ProtocolError | None:
        if raw is None:
            return None
        if not isinstance(raw, bytes):
            return ProtocolError(f"{self._record_key(record_id)}: {raw}")
        try:
            return self._decode(record_id, raw)
        except ProtocolError as error:
            return error

    async def change(
        self,
        record_id: str,
        change: Callable[[R, int], R | None],
        keep_ms: int | None = None,
    ) -> R | None:
        """Changes a record in one step, as it is then.

        Args:
            record_id: Which.
            change: Given the record and the time of Redis in ms, returns the new one,
                or None to leave it as it is. Called again when another process
                changed it meanwhile.
            keep_ms: How long the record stays from now on; None: as long as before.

        Returns:
            The record as it is now; None when there is none.
        """
        return await self._session.patiently(
            lambda: self._change(record_id, change, keep_ms)
        )

    async def prolong(
        self,
        record_id: str,
        tenant: str,
        change: Callable[[R, int], R | None],
        keep_ms: int,
    ) -> R | None:
        """Changes a record that is to stay for longer, and with it the tenant's index.

        Args:
            record_id: Which.
            tenant: Whose it is.
            change: As for `change`; None where it stays for long enough.
            keep_ms: How long it stays from now on if it is changed.

        Returns:
            The record as it is now; None when there is none.
        """
        index = self._index_key(tenant)

        async def prolong() -> R | None:
            if await self._redis.pttl(index) < keep_ms:
                await self._redis.pexpire(index, keep_ms)
            return await self._change(record_id, change, keep_ms)

        return await self._session.patiently(prolong)

    async def delete(self, record_id: str, tenant: str) -> bool:
        """Removes a record; whether there was one."""

        async def remove() -> int:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.delete(self._record_key(record_id))
            pipeline.zrem(self._index_key(tenant), record_id)
            return int((await pipeline.execute())[0])

        return bool(await self._session.patiently(remove))

    async def page(
        self,
        tenant: str,
        limit: int,
        after: str | None = None,
        *,
        oldest_first: bool = False,
        wanted: Callable[[R], bool] = lambda record: True,  # noqa: ARG005
    ) -> tuple[list[R], bool]:
        """Returns some of a tenant's records by time of creation.

        Args:
            tenant: Whose.
            limit: Most records.
            after: Begin behind this one, which may have gone from the index: then it
                is an empty page.
            oldest_first: Instead of the newest first.
            wanted: Which records count.

        Returns:
            The records, and whether there are more.
        """
        index = self._index_key(tenant)
        start = 0
        if after is not None:
            rank = ("ZRANK" if oldest_first else "ZREVRANK", index, after)
            (found,) = await self._session.read(rank)
            if found is None:
                return [], False
            start = int(found) + 1
        records: list[R] = []
        while len(records) <= limit:
            page = await self._page(index, start, oldest_first=oldest_first)
            if page is None:
                break
            records += [record for record in page if wanted(record)]
            start += _PAGE
        return records[:limit], len(records) > limit

    async def _page(
        self, index: str, start: int, *, oldest_first: bool
    ) -> list[R] | None:
        command = "ZRANGE" if oldest_first else "ZREVRANGE"
        (names,) = await self._session.read((command, index, start, start + _PAGE - 1))
        if not names:
            return None
        ids = [name.decode() for name in names]
        return await self.readable(ids)

    async def ids_of(self, tenant: str) -> list[str]:
        """Returns the ids of a tenant's records, also of some that have gone."""
        (names,) = await self._session.read(("ZRANGE", self._index_key(tenant), 0, -1))
        return [name.decode() for name in names]

    async def readable(self, ids: Sequence[str]) -> list[R]:
        """Returns those of some records that are there and can be read."""
        return _readable(await self.get_many(ids))

    async def forget_gone(self, tenant: str) -> None:
        """Takes names out of an index whose records have expired."""
        index, ids = self._index_key(tenant), await self.ids_of(tenant)
        for start in range(0, len(ids), _PAGE):
            some = ids[start : start + _PAGE]
            exist = await self._session.read(
                *(("EXISTS", self._record_key(record_id)) for record_id in some)
            )
            gone = [i for i, there in zip(some, exist, strict=True) if not there]
            if gone:
                await self._redis.zrem(index, *gone)

    async def _change(
        self,
        record_id: str,
        change: Callable[[R, int], R | None],
        keep_ms: int | None,
    ) -> R | None:
        key = self._record_key(record_id)
        for _ in range(_ATTEMPTS):
            async with transaction(self._redis) as pipeline:
                await pipeline.watch(key)
                raw = await pipeline.get(key)
                if raw is None:
                    return None
                record = self._decode(record_id, raw)
                new = change(record, time_ms(await pipeline.time()))
                if new is None:
                    return record
                pipeline.multi()  # type: ignore[no-untyped-call]
                encoded = msgspec.json.encode(new)
                pipeline.set(key, encoded, px=keep_ms, keepttl=keep_ms is None)
                try:
                    await pipeline.execute()
                except WatchError:
                    continue
                return new
        raise ProtocolError(f"{key} is changed by others all the time")

    def _decode(self, record_id: str, raw: bytes) -> R:
        try:
            return self._decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"{self._record_key(record_id)} cannot be read: {error}"
            ) from None


def _readable(found: Mapping[str, R | ProtocolError | None]) -> list[R]:
    """Leaves out what is gone, and what another release wrote."""
    records: list[R] = []
    for one in found.values():
        if isinstance(one, ProtocolError):
            _log.warning("record_left_out", why=str(one))
        elif one is not None:
            records.append(one)
    return records
