"""`Client.history()`: the last hour of the pool, as its janitor noted it."""

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.keys import HISTORY
from ...shared.watch.snapshot import HistorySample as HistorySample

if TYPE_CHECKING:
    from ..session import Session

MOST: Final = 360
_log: Final = logging.getLogger("tokenmill.producer")


async def history(session: "Session", last: int = MOST) -> list[HistorySample]:
    """Returns samples, oldest first; one each ten seconds while a janitor ran.

    Args:
        session: A client's connections.
        last: Most samples, the newest.
    """
    count = max(1, min(last, MOST))
    (entries,) = await session.read(("XREVRANGE", HISTORY, "+", "-", "COUNT", count))
    samples: list[HistorySample] = []
    for name, fields in reversed(entries):
        try:
            samples.append(msgspec.json.decode(fields[b"s"], type=HistorySample))
        except (msgspec.DecodeError, KeyError) as error:
            _log.warning(
                "%s has an entry %r that is no sample: %s", HISTORY, name, error
            )
    return samples
