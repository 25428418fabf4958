"""How much of the store a tenant may fill, whichever gateways its uploads come through.

What is there is counted in the records of its files. What arrives is noted in Redis for
as long as it does, in one step with the count: so many uploads at once, at however many
gateways, cannot fill more than one after the other. A note is renewed while its upload
goes on, and lapses with a gateway that dies.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog
from redis.exceptions import WatchError

from ...shared.errors import RedisUnavailable, TokenmillError
from ...shared.file_keys import arriving_key
from ...shared.tasks import end_tasks
from ...shared.transactions import transaction
from .errors import ApiError

if TYPE_CHECKING:
    from .context import Gateway
    from .files_models import FileRecord
    from .owned_records import OwnedRecords

NOTE_S: Final = 60.0
"""How long the note of an upload counts; it is renewed three times as often."""
_ATTEMPTS: Final = 100
_log = structlog.get_logger(__name__)


class FilesQuota:
    """Grants room to uploads.

    Args:
        owner: The gateway; its settings `max_file_bytes`, `max_tenant_files` and
            `max_tenant_bytes` are the bounds.
    """

    def __init__(self, owner: "Gateway") -> None:
        self._owner = owner
        self._settings = owner.config.gateway

    @property
    def too_many_bytes(self) -> ApiError:
        """What an upload is told for which there is no room."""
        most = self._settings.max_tenant_bytes
        return _full(f"{most} bytes in files (gateway.max_tenant_bytes)")

    @asynccontextmanager
    async def room(
        self,
        records: "OwnedRecords[FileRecord]",
        tenant: str,
        file_id: str,
        expected: int | None,
    ) -> AsyncIterator[int]:
        """Keeps room for an upload for the length of a `with` block.

        Args:
            records: Of all files.
            tenant: Whose it is.
            file_id: Of the file that is to be.
            expected: Bytes that it will have at most, if that is known; else all that
                are left are kept for it.

        Yields:
            The bytes that it may have.

        Raises:
            ApiError: 403: the tenant has as many files or bytes as it may.
        """
        patiently = self._owner.client.session.patiently
        left, note = await patiently(
            lambda: self._note(records, tenant, file_id, expected)
        )
        renewing = asyncio.create_task(self._renew(tenant, note))
        try:
            yield left
        finally:
            await end_tasks(renewing)
            await asyncio.shield(self._forget(tenant, note))

    async def _note(
        self,
        records: "OwnedRecords[FileRecord]",
        tenant: str,
        file_id: str,
        expected: int | None,
    ) -> tuple[int, str]:
        """Counts, and notes the upload unless another one came in between."""
        key, redis = arriving_key(tenant), self._owner.redis
        stored: dict[str, int] = {}
        for _ in range(_ATTEMPTS):
            async with self._owner.counting, transaction(redis) as pipeline:
                await pipeline.watch(key)
                seconds, _us = await pipeline.time()
                now_ms = int(seconds) * 1000
                notes = await pipeline.zrangebyscore(key, now_ms, "+inf")
                arriving = dict(_read(note) for note in notes)
                # Read after the notes: what has arrived since is in both, once by id.
                ids = await records.ids_of(tenant)
                new = await records.readable([one for one in ids if one not in stored])
                stored |= {record.id: record.num_bytes for record in new}
                arriving |= {one: stored[one] for one in ids if one in stored}
                arriving.pop(file_id, None)  # where an answer was lost on the way
                left = self._left(arriving)
                note = f"{file_id}:{left if expected is None else min(expected, left)}"
                pipeline.multi()  # type: ignore[no-untyped-call]
                pipeline.zremrangebyscore(key, "-inf", now_ms)
                pipeline.zadd(key, {note: now_ms + round(NOTE_S * 1000)})
                pipeline.pexpire(key, round(NOTE_S * 1000))
                try:
                    await pipeline.execute()
                except WatchError:
                    continue
                return left, note
        raise RedisUnavailable(f"{key} is changed by others all the time; try again")

    def _left(self, sizes: dict[str, int]) -> int:
        """Bytes that one more file may have beside those of these sizes."""
        most_files = self._settings.max_tenant_files
        if len(sizes) >= most_files:
            raise _full(f"{most_files} files (gateway.max_tenant_files)")
        left = self._settings.max_tenant_bytes - sum(sizes.values())
        if left <= 0:
            raise self.too_many_bytes
        return min(left, self._settings.max_file_bytes)

    async def _renew(self, tenant: str, note: str) -> None:
        redis, key = self._owner.redis, arriving_key(tenant)

        async def renew() -> None:
            seconds, _us = await redis.time()
            pipeline = redis.pipeline(transaction=False)
            pipeline.zadd(key, {note: int(seconds) * 1000 + round(NOTE_S * 1000)})
            pipeline.pexpire(key, round(NOTE_S * 1000))
            await pipeline.execute()

        while True:
            await asyncio.sleep(NOTE_S / 3)
            try:
                await self._owner.client.session.patiently(renew)
            except TokenmillError as error:
                _log.warning("upload_not_noted", tenant=tenant, code=error.code)

    async def _forget(self, tenant: str, note: str) -> None:
        redis, key = self._owner.redis, arriving_key(tenant)
        try:
            await self._owner.client.session.patiently(lambda: redis.zrem(key, note))
        except TokenmillError as error:
            # It lapses by itself, and the upload has its own answer.
            _log.warning("upload_still_noted", tenant=tenant, code=error.code)


def _read(note: bytes) -> tuple[str, int]:
    """The id and the bytes of an upload that arrives."""
    file_id, _, num_bytes = note.decode(errors="replace").partition(":")
    return file_id, int(num_bytes) if num_bytes.isdigit() else 0


def _full(most: str) -> ApiError:
    return ApiError(
        403,
        f"the tenant may have {most}, those that arrive now included; delete what is "
        "not needed any more, with DELETE /v1/files/ID",
        code="files_quota_exceeded",
        param="file",
    )
