"""The work on one batch: check its input, run it, write its files.

Each step may be cut off anywhere and begun again by whoever has the batch next.
"""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog

from ...shared.bulk.store import RunStore
from ...shared.errors import InvalidRequest, UnknownRun
from ...shared.messages import Usage
from ..bulk.driver import BulkDriver
from ..bulk.index import Index
from ..bulk.window import Window
from .batches_files import Assembled
from .batches_input import Checked
from .batches_models import BatchFault, BatchRecord
from .batches_one import Ended, OneBatch
from .files_store import FilesStore

if TYPE_CHECKING:
    from .batches_lease import BatchLease
    from .context import Gateway

WINDOW_ITEMS: Final = 1000
WINDOW_BYTES: Final = 16 * 1024 * 1024
"""Of one batch in Redis and in the gateway's memory; one gateway may drive many."""
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class BatchWork:
    """Brings one batch to its end.

    Args:
        owner: The gateway.
        lease: Holds the batch, and knows its record.
        directory: Of the gateway's own, for what may be lost with it.
    """

    def __init__(self, owner: "Gateway", lease: "BatchLease", directory: Path) -> None:
        self._owner = owner
        self._lease = lease
        self._directory = directory
        self._stop = threading.Event()

    async def run(self) -> None:
        """Works until the batch has ended.

        Raises:
            LeaseLost: Another gateway has it now.
            TokenmillError: Something is not there; it is to be tried again later.
        """
        place = Path(
            tempfile.mkdtemp(prefix=f"{self._record.id}.", dir=self._directory)
        )
        try:
            await self._work(place)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    @property
    def _record(self) -> BatchRecord:
        return self._lease.record

    async def _work(self, place: Path) -> None:
        store = await self._owner.files.store()
        try:
            path = await self._fetch(store, place)
        except FileNotFoundError:
            await self._fail("file_not_found", "the input file was deleted or expired")
            return
        index = await self._in_thread(lambda: Index(place / "index.sqlite"))
        try:
            one = await OneBatch.made(self._owner, self._record, store, path, index)
            await self._check_and_run(one)
        except InvalidRequest as error:
            await self._fail(error.code, str(error))
        finally:
            await asyncio.to_thread(index.close)

    async def _check_and_run(self, one: OneBatch) -> None:
        # In full each time: the index is new, and is to know every id of the input.
        checked = await self._in_thread(lambda: one.check(self._stop))
        if self._record.status == "validating" and checked.fails:
            await self._lease.change(lambda r, now: _refused(r, now, checked))
            return
        await self._lease.change(lambda r, now: _begun(r, now, checked.total))
        ended = await self._drive(one)
        await self._lease.change(_finalizing)
        await self._in_thread(one.sink.load)
        assembled = await self._in_thread(lambda: one.assemble(ended, self._stop))
        await self._list_files(assembled)
        await self._lease.change(lambda r, now: _ended(r, now, ended, assembled))
        await one.store.remove_all(self._record.name)

    async def _drive(self, one: OneBatch) -> Ended:
        """Runs what is left; returns the status that the batch is to have."""
        await self._in_thread(one.sink.load)
        driver = BulkDriver(
            self._owner.client,
            one.source,
            one.sink,
            one.spec,
            run_id=self._record.run,
            on_progress=self._lease.note,
            window=Window(WINDOW_ITEMS, WINDOW_BYTES),
            keep_ms=round(self._owner.config.bulk.keep_s * 1000),
        )
        stopping = asyncio.create_task(self._stop_in_time())
        try:
            report = await driver.run()
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        self._lease.note_usage(
            Usage(
                prompt_tokens=report.prompt_tokens,
                completion_tokens=report.completion_tokens,
            )
        )
        if report.succeeded + report.failed + report.refused >= self._record.total:
            return "completed"
        is_cancelled = self._record.cancelling_ms is not None
        return "expired" if self._lease.is_late and not is_cancelled else "cancelled"

    async def _stop_in_time(self) -> None:
        """Cancels the run once the batch is cancelled or its time is over."""
        await self._lease.until_over()
        run = RunStore(self._owner.redis, self._record.run)
        while True:
            try:
                await self._owner.client.session.patiently(run.cancel)
                return
            except UnknownRun:
                await asyncio.sleep(0.1)  # the driver is about to make it

    async def _fetch(self, store: FilesStore, place: Path) -> Path:
        """Returns the input as a file of this host."""
        name = f"{self._record.tenant}/{self._record.input_file_id}"
        local = store.local_path(name)
        if local is not None:
            if not await asyncio.to_thread(Path(local).exists):
                raise FileNotFoundError(local)
            return Path(local)
        path = place / "input"
        with path.open("wb") as file:
            async for chunk in store.read(name):
                await asyncio.to_thread(file.write, chunk)
        return path

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Runs something beside the loop, and leaves only once it has stopped."""
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.wait((running,))
            raise

    async def _list_files(self, assembled: Assembled) -> None:
        record, files = self._record, self._owner.files
        for file_id, kind, num_bytes in (
            (record.output_id, "output", assembled.output_bytes),
            (record.error_id, "error", assembled.error_bytes),
        ):
            if num_bytes:
                await files.keep(
                    record.tenant,
                    file_id,
                    filename=f"{record.id}_{kind}.jsonl",
                    purpose="batch_output",
                    num_bytes=num_bytes,
                )

    async def _fail(self, code: str, message: str) -> None:
        fault = BatchFault(code=code, message=message)
        _log.warning("batch_failed", batch=self._record.id, code=code)
        await self._lease.change(
            lambda record, now: msgspec.structs.replace(
                record, status="failed", failed_ms=now, faults=(fault,)
            )
        )


def _refused(record: BatchRecord, now_ms: int, checked: Checked) -> BatchRecord:
    return msgspec.structs.replace(
        record,
        status="failed",
        failed_ms=now_ms,
        total=checked.total,
        failed=checked.num_wrong,
        faults=checked.faults,
    )


def _begun(record: BatchRecord, now_ms: int, total: int) -> BatchRecord:
    if record.status != "validating":  # it was cancelled meanwhile
        return msgspec.structs.replace(record, total=total)
    return msgspec.structs.replace(
        record, status="in_progress", in_progress_ms=now_ms, total=total
    )


def _finalizing(record: BatchRecord, now_ms: int) -> BatchRecord:
    status = "cancelling" if record.status == "cancelling" else "finalizing"
    return msgspec.structs.replace(record, status=status, finalizing_ms=now_ms)


def _ended(
    record: BatchRecord, now_ms: int, ended: Ended, assembled: Assembled
) -> BatchRecord:
    at = {f"{ended}_ms": now_ms}
    return msgspec.structs.replace(
        record,
        status=ended,
        completed=assembled.completed,
        failed=assembled.failed,
        has_output=assembled.output_bytes > 0,
        has_errors=assembled.error_bytes > 0,
        **at,
    )
