"""The work on one batch: check its input, run it, write its files.

Each step may be cut off anywhere and begun again by whoever has the batch next.
"""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog

from ...shared.bulk.store import RunStore
from ...shared.errors import InvalidRequest, UnknownRun
from ...shared.messages import Usage
from ...shared.tasks import end_tasks
from ..bulk.answers import RequestForm
from ..bulk.driver import BulkDriver
from ..bulk.flow import Report
from ..bulk.index import Index
from ..bulk.window import Window
from .batches_end import BatchEnd
from .batches_files import assemble
from .batches_input import Checked
from .batches_models import BatchFault, BatchRecord
from .batches_one import Ended, OneBatch
from .batches_parts import Parts
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
        threads: Where it reads and writes; they serve batches alone.
    """

    def __init__(
        self,
        owner: "Gateway",
        lease: "BatchLease",
        directory: Path,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._owner = owner
        self._lease = lease
        self._directory = directory
        self._threads = threads
        self._end = BatchEnd(owner.files, lease)
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
            await self._fail(
                store, "file_not_found", "the input file was deleted or expired"
            )
            return
        index = await self._in_thread(lambda: Index(place / "index.sqlite"))
        try:
            one = await OneBatch.made(
                self._owner, self._record, store, path, index, self._stop
            )
            await self._check_and_run(one)
        except InvalidRequest as error:
            await self._fail(store, error.code, str(error))
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
        record = await self._end.begin(ended)
        await self._in_thread(one.sink.load)
        assembled = await self._in_thread(
            lambda: one.assemble(record, ended, self._stop)
        )
        await self._end.finish(ended, assembled)

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
            report = await self._to_its_end(driver)
        finally:
            await end_tasks(stopping)
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

    async def _to_its_end(self, driver: BulkDriver) -> Report:
        """Runs the driver; its thread is told to stop before it is waited for."""
        running = asyncio.create_task(driver.run())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stop.set()
            await end_tasks(running)
            raise

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
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.gather(running, return_exceptions=True)
            raise

    async def _fail(self, store: FilesStore, code: str, message: str) -> None:
        """Ends the batch for what is wrong with its input; what is done stays."""
        fault = BatchFault(code=code, message=message)
        _log.warning("batch_failed", batch=self._record.id, code=code)
        run = RunStore(self._owner.redis, self._record.run)
        with suppress(UnknownRun):  # it may have failed before it had one
            await self._owner.client.session.patiently(run.cancel)
        record = await self._end.begin("failed")
        parts, form = Parts(store, record.name), RequestForm(record.run)
        assembled = await self._in_thread(
            lambda: assemble(store, record, parts, None, form, "failed", self._stop)
        )
        await self._end.finish("failed", assembled, (fault,))


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
