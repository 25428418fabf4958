"""Reading the waiting streams from cursors kept in memory."""

from typing import Final, cast

import redis.asyncio
import redis.exceptions
import structlog

from ..shared.keys import Keys
from ..shared.messages import JobClass
from .entries import Stream, lane_stream
from .waiting import WaitingRoom

ROUND_ENTRIES: Final = 1_024
"""Entries read in one round, over all lanes, so that a round has a bound."""
LEAST_PER_LANE: Final = 8

RawEntry = tuple[Stream, bytes, dict[bytes, bytes]]
"""Where it stands, its stream id, its fields."""
_log = structlog.get_logger(__name__)


class LaneReader:
    """Reads new entries of the lanes of one class.

    Args:
        client: Redis.
        keys: The shard's names.
        job_class: Whose lanes; `resume` is read with the interactive ones.
        room: What was read before and is not dispatched yet.
        read_ahead: Most entries of a lane in memory.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        keys: Keys,
        job_class: JobClass,
        room: WaitingRoom,
        read_ahead: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._job_class = job_class
        self._room = room
        self._read_ahead = read_ahead
        self._cursors: dict[str, bytes] = {}
        self._unreadable: set[str] = set()

    async def read(self) -> list[RawEntry]:
        """Returns entries that were not read before, oldest first in each lane."""
        streams = await self._streams()
        if not streams:
            return []
        share = ROUND_ENTRIES // len(streams)
        count = min(self._read_ahead, max(share, LEAST_PER_LANE))
        cursors = {key: self._cursors.get(key, b"0") for key in streams}
        try:
            reply = await self._client.xread(cursors, count=count)  # type: ignore[arg-type]
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            await self._find_unreadable(list(streams))
            return []
        entries: list[RawEntry] = []
        for key, rows in cast("list[tuple[bytes, list[object]]]", reply or []):
            stream = streams[key.decode()]
            for entry_id, fields in cast(
                "list[tuple[bytes, dict[bytes, bytes]]]", rows
            ):
                entries.append((stream, entry_id, fields or {}))
                self._cursors[stream.key] = entry_id
        # What was redelivered has waited already.
        entries.sort(key=lambda entry: entry[0].job_class is not None)
        return entries

    async def _streams(self) -> dict[str, Stream]:
        """The streams of this class that have entries and room in memory."""
        members = cast(
            "list[bytes]", await self._client.zrange(self._keys.lanes, 0, -1)
        )
        streams: dict[str, Stream] = {}
        if self._job_class is JobClass.INTERACTIVE:
            streams[self._keys.resume] = Stream(self._keys.resume, None)
        for member in members:
            stream = lane_stream(self._keys, member)
            if stream is None:
                _log.warning("no_such_lane", member=repr(member[:80]))
                await self._client.zrem(self._keys.lanes, member)
            elif stream.job_class is self._job_class and self._wanted(stream):
                streams[stream.key] = stream
        return {k: s for k, s in streams.items() if k not in self._unreadable}

    def _wanted(self, stream: Stream) -> bool:
        # Half a read-ahead at a time: fewer, larger reads, and a bound in memory.
        few = self._room.count(stream.key) <= self._read_ahead // 2
        return few and self._room.accepts(stream.job_class)

    async def _find_unreadable(self, names: list[str]) -> None:
        """Leaves out keys that a stranger made as another type than stream."""
        for name in names:
            kind = await self._client.type(name)
            if kind not in (b"stream", b"none"):
                self._unreadable.add(name)
                _log.error("lane_is_no_stream", key=name, type=kind.decode())
