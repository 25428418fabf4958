"""Reading the waiting streams from cursors kept in memory."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, cast

import redis.asyncio
import redis.exceptions
import structlog

from ..shared.keys import Keys
from ..shared.messages import JobClass
from .entries import Stream, lane_stream
from .waiting import MOST_RESUMED_JOBS, WaitingRoom

ROUND_ENTRIES: Final = 1_024
"""Entries read in one round, over all lanes, so that a round has a bound."""
LEAST_PER_LANE: Final = 8
REMEMBERED: Final = 32
"""Lanes read before the list of lanes is known: jobs mostly arrive in the same ones,
and one round trip is saved."""

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
        self.job_class = job_class
        self._room = room
        self._read_ahead = read_ahead
        self._cursors: dict[str, bytes] = {}
        self._unreadable: set[str] = set()
        self._remembered: OrderedDict[str, Stream] = OrderedDict()
        self.full = False
        """The last read left entries behind that can be read now."""
        self.held_back = False
        """The last read left a lane out, since enough of it is in memory."""

    async def read(
        self, along: Sequence[tuple[str, ...]] = ()
    ) -> tuple[list[RawEntry], list[object]]:
        """Reads on.

        Args:
            along: Other reads for the same round trip.

        Returns:
            Entries that were not read before, oldest first in each lane, and the
            replies to `along`, errors included.
        """
        self.full = False
        guess = {k: s for k, s in self._remembered.items() if self._wanted(s)}
        resume = Stream(self._keys.resume, None)
        if self.job_class is JobClass.INTERACTIVE and self._wanted(resume):
            guess[resume.key] = resume
        guess = self._readable(guess)
        pipe = self._client.pipeline(transaction=False)
        pipe.zrange(self._keys.lanes, 0, -1)
        for command in along:
            pipe.execute_command(*command)
        count = self._ask(pipe, guess)
        members, *rows = await pipe.execute(raise_on_error=False)
        beside, rows = rows[: len(along)], rows[len(along) :]
        if isinstance(members, Exception):
            raise members
        entries = await self._taken(guess, count, rows)
        streams = await self._streams(cast("list[bytes]", members))
        others = {k: s for k, s in streams.items() if k not in guess}
        if others:
            pipe = self._client.pipeline(transaction=False)
            count = self._ask(pipe, others)
            rows = await pipe.execute(raise_on_error=False)
            entries += await self._taken(others, count, rows)
        # What was redelivered has waited already.
        entries.sort(key=lambda entry: entry[0].job_class is not None)
        return entries, beside

    def _ask(
        self, pipe: "redis.asyncio.client.Pipeline", streams: Mapping[str, Stream]
    ) -> int:
        """Adds one XREAD; returns the most entries it brings of a stream."""
        if not streams:
            return 0
        share = ROUND_ENTRIES // len(streams)
        count = min(self._read_ahead, max(share, LEAST_PER_LANE))
        cursors = {key: self._cursors.get(key, b"0") for key in streams}
        pipe.xread(cursors, count=count)  # type: ignore[arg-type]
        return count

    async def _taken(
        self, streams: Mapping[str, Stream], count: int, replies: Sequence[object]
    ) -> list[RawEntry]:
        """Moves the cursors over what was read."""
        entries: list[RawEntry] = []
        for reply in replies:
            if isinstance(reply, Exception):
                if not str(reply).startswith("WRONGTYPE"):
                    raise reply
                await self._find_unreadable(list(streams))
                self.full = True  # what stands beside the unreadable one
                return entries
            for key, rows in cast("list[tuple[bytes, list[object]]]", reply or []):
                stream = streams[key.decode()]
                self.full = self.full or len(rows) >= count
                for entry_id, fields in cast(
                    "list[tuple[bytes, dict[bytes, bytes]]]", rows
                ):
                    entries.append((stream, entry_id, fields or {}))
                    self._cursors[stream.key] = entry_id
        return entries

    async def _streams(self, members: Sequence[bytes]) -> dict[str, Stream]:
        """The lanes of this class that have entries and room in memory."""
        reads_resume = self.job_class is JobClass.INTERACTIVE
        self.held_back = reads_resume and not self._room.accepts(None)
        streams: dict[str, Stream] = {}
        for member in members:
            stream = lane_stream(self._keys, member)
            if stream is None:
                _log.warning("no_such_lane", member=repr(member[:80]))
                await self._client.zrem(self._keys.lanes, member)
            elif stream.job_class is not self.job_class:
                continue
            elif self._wanted(stream):
                streams[stream.key] = stream
                self._remember(stream)
            else:
                self.held_back = True
        return self._readable(streams)

    def _remember(self, stream: Stream) -> None:
        self._remembered[stream.key] = stream
        self._remembered.move_to_end(stream.key)
        if len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)

    def _readable(self, streams: Mapping[str, Stream]) -> dict[str, Stream]:
        return {k: s for k, s in streams.items() if k not in self._unreadable}

    def _wanted(self, stream: Stream) -> bool:
        if stream.job_class is None:
            # Of all tenants and classes: a bound of its own would hide some of them.
            unfetched = self._room.unfetched[stream.key]
            return unfetched < MOST_RESUMED_JOBS and self._room.accepts(None)
        # Half a read-ahead at a time: fewer, larger reads, and a bound in memory.
        few = self._room.count(stream.key) <= self._read_ahead // 2
        few = few or self._room.lacks(stream.key, stream.job_class, self._read_ahead)
        return few and self._room.accepts(stream.job_class)

    async def _find_unreadable(self, names: list[str]) -> None:
        """Leaves out keys that a stranger made as another type than stream."""
        for name in names:
            kind = await self._client.type(name)
            if kind not in (b"stream", b"none"):
                self._unreadable.add(name)
                _log.error("lane_is_no_stream", key=name, type=kind.decode())
