"""Finds batches that nobody works on, and works on them."""

import asyncio
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from ...shared.connection import state_dir
from ...shared.errors import LeaseLost, ProtocolError, TokenmillError
from ...shared.file_keys import OPEN_BATCHES
from ...shared.tasks import end_tasks, until_first_ends
from ...shared.webhooks import WebhookEvent, announce
from .batches_lease import BatchLease, batch_records, claim, happens
from .batches_models import BatchObject, BatchRecord
from .batches_open import in_turn, open_batches
from .batches_scratch import Scratch
from .batches_work import BatchWork

if TYPE_CHECKING:
    from .context import Gateway

MOST_DRIVEN: Final = 16
"""Batches that one gateway works on at a time; the others wait."""
MOST_OF_A_TENANT: Final = MOST_DRIVEN // 2
"""Of them, so that no tenant's batches keep out those of all others."""
THREADS: Final = 4
"""Where inputs are read and files put together, apart from all other work."""
_LOOK_S: Final = 2.0
"""Time between two looks for batches of a gateway that is gone."""
_AGAIN_S: Final = (1.0, 60.0)
"""First and longest wait before a batch whose work broke off is taken again."""
_log = structlog.get_logger(__name__)


class BatchKeeper:
    """Works on batches for as long as the gateway runs.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: "Gateway") -> None:
        self._owner = owner
        self._driver = secrets.token_hex(8)
        self._new = asyncio.Event()
        self._leases: dict[str, BatchLease] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, tuple[float, float]] = {}
        """Batch -> when it may be taken again, and the wait after that."""

    def look(self, batch_id: str | None = None) -> None:
        """Takes notice of a new batch, or of what was asked for one."""
        lease = self._leases.get(batch_id or "")
        if lease is not None:
            lease.look()
        self._new.set()

    async def run(self) -> None:
        """Works on batches until it is cancelled; others go on with them then."""
        parent = state_dir(self._owner.config) / "batches"
        self._scratch = await asyncio.to_thread(Scratch, parent)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="batches")
        try:
            while True:
                self._new.clear()
                await self._take_or_tell()
                await happens(self._new, _LOOK_S)
        finally:
            await end_tasks(*self._tasks.values())
            self._threads.shutdown(wait=False)  # they were waited for, one by one
            await asyncio.to_thread(self._scratch.remove)

    async def _take_or_tell(self) -> None:
        """A look that fails is repeated, and ends no work that goes on meanwhile."""
        try:
            await self._take()
        except TokenmillError as error:
            _log.warning("batches_not_seen", code=error.code, why=str(error))
        except Exception:  # noqa: BLE001 - the next look may find what this did not
            _log.exception("batches_not_seen")

    async def _take(self) -> None:
        """Begins work on what is open and free; tenants take turns."""
        found = await open_batches(self._owner.client.session)
        for batch_id in found.gone:
            await self._owner.redis.zrem(OPEN_BATCHES, batch_id)
        for batch_id, problem in found.unreadable.items():
            if self._may_try(batch_id):
                self._put_off(batch_id, problem.code, str(problem))
        busy = Counter(lease.record.tenant for lease in self._leases.values())
        free = [r for r in found.records if self._is_free(r, found.now_ms)]
        for record in in_turn(free, busy):
            has_room = busy[record.tenant] < MOST_OF_A_TENANT
            if has_room and len(self._tasks) < MOST_DRIVEN:
                busy[record.tenant] += await self._claim(record)
            elif _may_end(record, found.now_ms):
                await self._end_unbegun(record)

    async def _claim(self, record: BatchRecord) -> bool:
        """Takes a batch, unless it fails or another gateway was faster."""
        session = self._owner.client.session
        try:
            lease = await claim(session, record.id, self._driver, self._lease_ms)
        except ProtocolError as error:
            self._put_off(record.id, error.code, str(error))
            return False
        if lease is None:
            return False
        self._begin(lease)
        return True

    async def _end_unbegun(self, record: BatchRecord) -> None:
        """Ends a batch that waits for its turn: its time is over, or it is cancelled.

        None of its requests was looked at, so it has no files.
        """

        def end(record: BatchRecord, now_ms: int) -> BatchRecord | None:
            if not (self._is_free(record, now_ms) and _may_end(record, now_ms)):
                return None
            ended = "expired" if record.cancelling_ms is None else "cancelled"
            at = {f"{ended}_ms": now_ms}
            return msgspec.structs.replace(record, status=ended, **at)

        try:
            session = self._owner.client.session
            now = await batch_records(session).change(record.id, end)
            if now is not None and now.has_ended:
                _log.info("batch_ended", batch=now.id, status=now.status, begun=False)
                await self._conclude(now)
        except ProtocolError as error:
            self._put_off(record.id, error.code, str(error))

    def _is_free(self, record: BatchRecord, now_ms: int) -> bool:
        """Whether nobody works on it, and it may be tried."""
        is_held = record.driver not in ("", self._driver)
        if record.id in self._tasks or (is_held and record.driver_until_ms > now_ms):
            return False
        return self._may_try(record.id)

    def _may_try(self, batch_id: str) -> bool:
        at, _ = self._again.get(batch_id, (0.0, 0.0))
        return time.monotonic() >= at

    @property
    def _lease_ms(self) -> int:
        return round(self._owner.config.gateway.batch_lease_s * 1000)

    def _begin(self, lease: BatchLease) -> None:
        batch_id = lease.record.id
        _log.info("batch_begun", batch=batch_id, status=lease.record.status)
        self._leases[batch_id] = lease
        task = asyncio.create_task(self._drive(lease), name=f"batch {batch_id}")
        self._tasks[batch_id] = task
        task.add_done_callback(lambda _: self._done(batch_id))

    def _done(self, batch_id: str) -> None:
        del self._tasks[batch_id], self._leases[batch_id]
        self._new.set()

    async def _drive(self, lease: BatchLease) -> None:
        batch_id = lease.record.id
        try:
            await self._work(lease)
            self._again.pop(batch_id, None)
        except LeaseLost:
            _log.warning("batch_lost", batch=batch_id)
        except asyncio.CancelledError:
            await self._release(lease)
            raise
        except TokenmillError as error:
            self._put_off(batch_id, error.code, str(error))
            await self._release(lease)
        except Exception as error:  # noqa: BLE001 - one batch stops no other
            _log.exception("batch_broke_off", batch=batch_id)
            self._put_off(batch_id, "internal_error", type(error).__name__)
            await self._release(lease)

    async def _work(self, lease: BatchLease) -> None:
        if not lease.record.has_ended:
            working = asyncio.create_task(
                BatchWork(self._owner, lease, self._scratch.path, self._threads).run()
            )
            await until_first_ends(working, asyncio.create_task(lease.keep()))
            record = lease.record
            _log.info(
                "batch_ended",
                batch=record.id,
                status=record.status,
                completed=record.completed,
                failed=record.failed,
                total=record.total,
            )
        await self._conclude(lease.record)

    async def _conclude(self, record: BatchRecord) -> None:
        """Tells who asked for it, and takes the batch off the list of open ones."""
        redis, session = self._owner.redis, self._owner.client.session
        url = record.webhook
        if url is not None:
            event = WebhookEvent(
                id=f"batch/{record.id}",
                type=f"batch.{record.status}",
                data={"id": record.id, "tenant": record.tenant, "batch": _told(record)},
            )
            await session.patiently(lambda: announce(redis, url, event))
        await session.patiently(lambda: redis.zrem(OPEN_BATCHES, record.id))

    def _put_off(self, batch_id: str, code: str, why: str) -> None:
        first, longest = _AGAIN_S
        _, wait_s = self._again.get(batch_id, (0.0, first))
        self._again[batch_id] = (time.monotonic() + wait_s, min(2 * wait_s, longest))
        _log.warning(
            "batch_put_off", batch=batch_id, code=code, why=why, again_in_s=wait_s
        )

    async def _release(self, lease: BatchLease) -> None:
        try:
            async with asyncio.timeout(2.0):
                await lease.release()
        except (TokenmillError, TimeoutError) as error:
            # Its time runs out by itself.
            _log.info("lease_not_released", batch=lease.record.id, why=str(error))


def _told(record: BatchRecord) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(BatchObject.of(record))
    return shown


def _may_end(record: BatchRecord, now_ms: int) -> bool:
    """Whether a batch that never began is to end."""
    is_over = record.cancelling_ms is not None or record.expires_ms <= now_ms
    return is_over and record.in_progress_ms is None and not record.has_ended
