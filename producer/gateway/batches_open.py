"""Batches that have not ended: which they are, and which one is begun next."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.errors import ProtocolError
from ...shared.file_keys import OPEN_BATCHES
from .batches_lease import batch_records
from .batches_models import BatchRecord

if TYPE_CHECKING:
    from ..session import Session

_NEW_MS: Final = 60_000
"""A gateway of a former release names a batch as open before it has a record."""


class OpenBatches(msgspec.Struct, frozen=True, kw_only=True):
    """What one look found."""

    now_ms: int
    """By the clock of Redis."""
    records: tuple[BatchRecord, ...]
    unreadable: dict[str, ProtocolError]
    """Those of another release, say: batch -> what is wrong."""
    gone: tuple[str, ...]
    """Named, with no record any more."""


async def open_batches(session: "Session") -> OpenBatches:
    """Reads the records of all open batches, some hundreds in a round trip.

    Args:
        session: The client's connections.
    """
    records = batch_records(session)
    now_ms = await records.now_ms()
    (flat,) = await session.read(("ZRANGE", OPEN_BATCHES, 0, -1, "WITHSCORES"))
    named_ms = {
        raw.decode(errors="replace"): float(at)
        for raw, at in zip(flat[::2], flat[1::2], strict=True)
    }
    found: list[BatchRecord] = []
    unreadable: dict[str, ProtocolError] = {}
    gone: list[str] = []
    for batch_id, one in (await records.get_many(list(named_ms))).items():
        if isinstance(one, ProtocolError):
            unreadable[batch_id] = one
        elif one is not None:
            found.append(one)
        elif now_ms - named_ms[batch_id] > _NEW_MS:
            gone.append(batch_id)
    return OpenBatches(
        now_ms=now_ms, records=tuple(found), unreadable=unreadable, gone=tuple(gone)
    )


async def open_of(session: "Session", tenant: str) -> list[BatchRecord]:
    """Returns the batches of a tenant that have not ended."""
    found = await open_batches(session)
    return [r for r in found.records if r.tenant == tenant and not r.has_ended]


def in_turn(free: Iterable[BatchRecord], busy: Counter[str]) -> list[BatchRecord]:
    """Returns batches in the order to begin them: tenants take turns, oldest first.

    Args:
        free: Batches that nobody works on.
        busy: Tenant -> batches of it that are worked on; who has fewer goes first.
    """
    having = busy.copy()
    turns: list[tuple[int, int, str, BatchRecord]] = []
    for record in sorted(free, key=lambda r: (r.created_ms, r.id)):
        turn = (having[record.tenant], record.created_ms, record.id, record)
        turns.append(turn)
        having[record.tenant] += 1
    return [record for *_, record in sorted(turns, key=lambda turn: turn[:3])]
