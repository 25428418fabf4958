"""Files of tenants: content in the store, what is known of it in Redis.

They lie in a directory of this pool's own, under a name that its Redis has, so that a
store may hold other things, files of other pools too, and the janitor sees none.

Content first, then its record: a file that is listed is whole. What a gateway leaves
that dies between the two is removed by the janitor of any other.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ...shared.connection import state_dir
from ...shared.errors import StorageUnavailable
from ...shared.file_keys import FILES_PLACE, OPEN_BATCHES, file_key, files_key
from .files_models import FileRecord
from .files_names import leftover
from .files_quota import FilesQuota
from .files_store import FilesStore, Written
from .owned_records import OwnedRecords

if TYPE_CHECKING:
    from .context import Gateway

CLEAN_S: Final = 600.0
"""Time between two looks for what nobody needs any more."""
_GRACE_S: Final = 3600.0
"""An object without a record may still be on its way for so long."""
_PLACE: Final = re.compile(r"pool-[0-9a-f]{16}")
_log = structlog.get_logger(__name__)


def new_file_id() -> str:
    """Returns the id of a new file."""
    return f"file-{secrets.token_hex(16)}"


class Files:
    """Files of all tenants.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: "Gateway") -> None:
        self._owner = owner
        self.quota = FilesQuota(owner)
        self._store: FilesStore | None = None
        self._opening = asyncio.Lock()

    @property
    def records(self) -> OwnedRecords[FileRecord]:
        """What is known of each file."""
        return OwnedRecords(self._owner.client.session, FileRecord, file_key, files_key)

    @property
    def keep_ms(self) -> int:
        """How long a file stays."""
        return round(self._owner.config.gateway.files_keep_s * 1000)

    async def store(self) -> FilesStore:
        """Returns the store.

        Raises:
            StorageUnavailable: Its address cannot be one, or a package is missing.
        """
        async with self._opening:
            if self._store is None:
                url = f"{self._url.rstrip('/')}/{await self._place()}"
                # Off the event loop: a backend's modules take a second to import.
                self._store = await asyncio.to_thread(FilesStore, url)
            return self._store

    async def _place(self) -> str:
        """Returns this pool's own directory of the store, the same for all gateways."""
        redis, session = self._owner.redis, self._owner.client.session
        drawn = f"pool-{secrets.token_hex(8)}"
        await session.patiently(lambda: redis.set(FILES_PLACE, drawn, nx=True))
        found = await session.patiently(lambda: redis.get(FILES_PLACE))
        place = (found or b"").decode(errors="replace")
        if not _PLACE.fullmatch(place):
            raise StorageUnavailable(
                f"{FILES_PLACE} is {place[:40]!r}; expected pool- and 16 hex digits, "
                "the directory of this pool's files"
            )
        return place

    @asynccontextmanager
    async def writing(self, tenant: str, file_id: str) -> AsyncIterator[Written]:
        """Writes the content of a new file for the length of a `with` block."""
        store = await self.store()
        async with store.writing(f"{tenant}/{file_id}") as written:
            yield written

    async def keep(
        self, tenant: str, file_id: str, *, filename: str, purpose: str, num_bytes: int
    ) -> FileRecord:
        """Lists a file whose content has been written."""
        now_ms = await self.records.now_ms()
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_ms=now_ms,
            expires_ms=now_ms + self.keep_ms,
        )
        # The files of a batch are listed again where that was cut off.
        await self.records.add(
            file_id, tenant, record, now_ms, self.keep_ms, replace=True
        )
        return record

    async def keep_until(self, record: FileRecord, until_ms: int) -> bool:
        """Keeps a file at least until then; whether it is still there.

        Args:
            record: The file.
            until_ms: By the clock of Redis.
        """

        def longer(record: FileRecord, _now_ms: int) -> FileRecord | None:
            if record.expires_ms >= until_ms:
                return None
            return msgspec.structs.replace(record, expires_ms=until_ms)

        keep_ms = until_ms - await self.records.now_ms()
        kept = await self.records.prolong(record.id, record.tenant, longer, keep_ms)
        return kept is not None

    async def delete(self, record: FileRecord) -> bool:
        """Removes a file; whether it was there."""
        there = await self.records.delete(record.id, record.tenant)
        await (await self.store()).remove(record.name)
        return there

    async def discard(self, tenant: str, file_id: str) -> None:
        """Removes content that is to have no record."""
        await (await self.store()).remove(f"{tenant}/{file_id}")

    async def clean_for_ever(self) -> None:
        """Removes what nobody needs, again and again."""
        while True:
            await asyncio.sleep(CLEAN_S)
            num_removed = await self.clean()
            if num_removed:
                _log.info("files_removed", files=num_removed)

    async def clean(self, grace_s: float = _GRACE_S) -> int:
        """Removes content whose file or batch is no more.

        Args:
            grace_s: What was written later than this many seconds ago is left alone.

        Returns:
            How many objects were removed.
        """
        store = await self.store()
        before_s = await store.now_s() - grace_s
        old = [
            name for name, written_s in await store.objects() if written_s < before_s
        ]
        gone = [name for name in old if not await self._is_needed(name)]
        for name in gone:
            await store.remove(name)
        for tenant in {name.partition("/")[0] for name in gone}:
            await self.records.forget_gone(tenant)
        return len(gone)

    def close(self) -> None:
        """Lets go of the store."""
        if self._store is not None:
            self._store.close()

    @property
    def _url(self) -> str:
        configured = self._owner.config.gateway.files_url
        if configured is not None:
            return configured
        return (Path(state_dir(self._owner.config)) / "files").as_uri()

    async def _is_needed(self, name: str) -> bool:
        of = leftover(name)
        if of is None:
            return True  # nothing that a gateway wrote
        read = self._owner.client.session.read
        if of.kind == "file":
            (found,) = await read(("EXISTS", file_key(of.id)))
            return bool(found)
        if of.kind == "part":
            (at,) = await read(("ZSCORE", OPEN_BATCHES, of.id))
            return at is not None
        return False
