"""A new batch: recorded once for its idempotency key, while its tenant may have one.

The count of the open batches and the record of one more are one step, through whichever
gateways they come: a new batch changes the tenant's index, and whoever counted before
that counts again.
"""

from typing import TYPE_CHECKING, Final

import msgspec
from redis.exceptions import WatchError

from ...shared.errors import IdempotencyConflict, RedisUnavailable
from ...shared.file_keys import OPEN_BATCHES, batch_key, batches_key
from ...shared.transactions import transaction
from .batches_lease import batch_records
from .batches_models import WINDOW_MS, BatchRecord
from .batches_open import open_of
from .errors import ApiError, retry_after
from .files_api import unknown_file

if TYPE_CHECKING:
    from .context import Gateway
    from .files_models import FileRecord

_SAME: Final = ("tenant", "endpoint", "input_file_id", "metadata")
"""What two requests with one idempotency key have in common."""
_QUOTA_RETRY_S: Final = 60.0
_END_MS: Final = 3_600_000
"""How long a batch may still read its input once its time is over."""
_ATTEMPTS: Final = 100


async def add_batch(
    owner: "Gateway", source: "FileRecord", draft: BatchRecord
) -> BatchRecord:
    """Records a batch from now on, or finds the one of the same idempotency key.

    Args:
        owner: The gateway; its setting `max_tenant_batches` is the bound.
        source: The input.
        draft: The record, whose times count from 0.

    Raises:
        ApiError: 429: the tenant has as many as it may; 404: the input has gone.
        IdempotencyConflict: The key was used for another batch.
    """
    session = owner.client.session
    now_ms = await batch_records(session).now_ms()
    record = msgspec.structs.replace(
        draft, created_ms=now_ms, expires_ms=now_ms + draft.expires_ms
    )
    there = await session.patiently(lambda: _write(owner, source, record))
    if there is None or not _is_same(there, record):
        raise IdempotencyConflict(
            f"the idempotency key was used for another batch of tenant "
            f"'{record.tenant}'; use a new key, or send the same"
        )
    return there


async def _write(
    owner: "Gateway", source: "FileRecord", record: BatchRecord
) -> BatchRecord | None:
    """Counts and records, unless there is a record of this id; returns what there is.

    Repeated after a lost answer it finds its own.
    """
    key, index = batch_key(record.id), batches_key(record.tenant)
    keep_ms = WINDOW_MS + owner.files.keep_ms
    for _ in range(_ATTEMPTS):
        async with owner.counting, transaction(owner.redis) as pipeline:
            await pipeline.watch(key, index)
            if await pipeline.exists(key):
                return await batch_records(owner.client.session).get(record.id)
            await _require_room(owner, record.tenant)
            if not await owner.files.keep_until(source, record.expires_ms + _END_MS):
                raise unknown_file(source.id)
            # Never sooner than before: a record in it may have been prolonged.
            index_ms = max(keep_ms, await pipeline.pttl(index))
            pipeline.multi()  # type: ignore[no-untyped-call]
            pipeline.zadd(OPEN_BATCHES, {record.id: record.created_ms}, nx=True)
            pipeline.pexpire(OPEN_BATCHES, keep_ms)
            pipeline.zadd(index, {record.id: record.created_ms}, nx=True)
            pipeline.pexpire(index, index_ms)
            pipeline.set(key, msgspec.json.encode(record), px=keep_ms)
            try:
                await pipeline.execute()
            except WatchError:
                continue
            return record
    raise RedisUnavailable(f"{index} is changed by others all the time; try again")


async def _require_room(owner: "Gateway", tenant: str) -> None:
    most = owner.config.gateway.max_tenant_batches
    if len(await open_of(owner.client.session, tenant)) >= most:
        raise ApiError(
            429,
            f"the tenant has {most} batches that have not ended "
            "(gateway.max_tenant_batches); wait for one, or cancel some",
            code="batches_quota_exceeded",
            headers=retry_after(_QUOTA_RETRY_S),
        )


def _is_same(one: BatchRecord, other: BatchRecord) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in _SAME)
