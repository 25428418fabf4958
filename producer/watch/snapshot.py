"""`Client.snapshot()`: the pool as it is now."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ...shared.watch.snapshot import PoolSnapshot as PoolSnapshot

if TYPE_CHECKING:
    from ...shared.watch.reading import PoolReader
    from ..session import Session

_readers: "WeakKeyDictionary[Session, PoolReader]" = WeakKeyDictionary()
"""By session: what was read of jobs that ended is read once."""


async def snapshot(session: "Session") -> PoolSnapshot:
    """Returns the pool at this moment, in three round trips.

    Args:
        session: A client's connections.

    Raises:
        RedisUnavailable: Redis did not answer for the client's patience.
    """
    reader = _readers.get(session)
    if reader is None:
        from ...shared.watch.reading import PoolReader

        reader = _readers[session] = PoolReader(session.read_each)
    return await reader.snapshot()
