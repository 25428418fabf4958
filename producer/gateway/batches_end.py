"""The end of a batch: its files get ids, content and records, and then it has ended.

Each attempt writes under ids of its own, which the record names before anything lies
under them: a gateway that was thought dead and writes on writes over nobody's files.
"""

from typing import TYPE_CHECKING

import msgspec

from ...shared.errors import LeaseLost
from .batches_files import Assembled
from .batches_models import BatchFault, BatchRecord
from .batches_one import Ended
from .files import new_file_id

if TYPE_CHECKING:
    from .batches_lease import BatchLease
    from .files import Files


class BatchEnd:
    """Ends one batch.

    Args:
        files: The gateway's.
        lease: Holds the batch, and knows its record.
    """

    def __init__(self, files: "Files", lease: "BatchLease") -> None:
        self._files = files
        self._lease = lease

    async def begin(self, ended: Ended) -> BatchRecord:
        """Draws ids for the files, and removes what an attempt before this one left.

        Returns:
            The record with the new ids.

        Raises:
            LeaseLost: Another gateway has it now.
        """
        earlier = self._lease.record
        ids = (new_file_id(), new_file_id())
        await self._lease.change(lambda r, now: _finalizing(r, now, ended, ids))
        if earlier.finalizing_ms is not None:
            await self._forget(earlier)
        return self._lease.record

    async def finish(
        self, ended: Ended, assembled: Assembled, faults: tuple[BatchFault, ...] = ()
    ) -> None:
        """Lists the files and ends the batch; its parts are of no use any more.

        Raises:
            LeaseLost: Another gateway has it now; of this attempt nothing is left.
        """
        record = self._lease.record
        await self._list_files(record, assembled)
        try:
            await self._lease.change(
                lambda r, now: _ended(r, now, ended, assembled, faults)
            )
        except LeaseLost:
            await self._forget(record)
            raise
        await (await self._files.store()).remove_all(record.name)

    async def _list_files(self, record: BatchRecord, assembled: Assembled) -> None:
        for file_id, kind, num_bytes in (
            (record.output_id, "output", assembled.output_bytes),
            (record.error_id, "error", assembled.error_bytes),
        ):
            if num_bytes:
                await self._files.keep(
                    record.tenant,
                    file_id,
                    filename=f"{record.id}_{kind}.jsonl",
                    purpose="batch_output",
                    num_bytes=num_bytes,
                )

    async def _forget(self, record: BatchRecord) -> None:
        for file_id in (record.output_id, record.error_id):
            await self._files.records.delete(file_id, record.tenant)
            await self._files.discard(record.tenant, file_id)


def _finalizing(
    record: BatchRecord, now_ms: int, ended: Ended, ids: tuple[str, str]
) -> BatchRecord:
    is_plain = ended != "failed" and record.status != "cancelling"
    return msgspec.structs.replace(
        record,
        status="finalizing" if is_plain else record.status,
        finalizing_ms=now_ms,
        output_id=ids[0],
        error_id=ids[1],
    )


def _ended(
    record: BatchRecord,
    now_ms: int,
    ended: Ended,
    assembled: Assembled,
    faults: tuple[BatchFault, ...],
) -> BatchRecord:
    at = {f"{ended}_ms": now_ms}
    return msgspec.structs.replace(
        record,
        status=ended,
        completed=assembled.completed,
        failed=assembled.failed,
        has_output=assembled.output_bytes > 0,
        has_errors=assembled.error_bytes > 0,
        faults=faults,
        **at,
    )
