"""What is kept of one document in Redis: its text, its levels, its parts."""

from collections.abc import Mapping, Sequence

import msgspec
import structlog

from ...shared.bulk.messages import Document
from ...shared.bulk.writes import RunWrites, part_field
from ...shared.errors import InvalidRequest, ProtocolError
from ...shared.script_runner import count_of, text
from .items import Standing, fields_of, standings
from .plans import Level, Part
from .pool import BulkPool

_log = structlog.get_logger(__name__)


class DocumentState:
    """Reads of the documents of one run, kept for the length of a turn.

    Args:
        pool: The process's view of the pool.
        writes: Of the run.
    """

    def __init__(self, pool: BulkPool, writes: RunWrites) -> None:
        self._pool = pool
        self._keys = writes.keys
        self._levels: dict[tuple[int, int, int], Level] = {}
        self._parts: dict[tuple[int, int, int], tuple[Part, ...]] = {}

    def tell_once(self, event: str, **facts: str) -> None:
        """Logs something of the run that stays true for a while, once."""
        name = f"{self._keys.run} {event}"
        if name not in self._pool.announced:
            self._pool.announced.add(name)
            _log.warning(event, run=self._keys.run, **facts)

    async def document(self, standing: Standing) -> Document:
        """Returns the document of an item.

        Raises:
            InvalidRequest: The item holds none.
        """
        place = (self._keys.run, standing.seq, standing.generation)
        found = self._pool.remembered(place)
        if found is None:
            known = await standings(self._pool.client, self._keys, [standing.seq])
            item = known[standing.seq].item if standing.seq in known else None
            if item is None or item.document is None:
                raise InvalidRequest("document", "the item has no document")
            found = item.document
            self._pool.remember(place, found)
        return found

    async def custom_id(self, standing: Standing) -> str:
        """Returns what the item is called in the input."""
        known = await standings(self._pool.client, self._keys, [standing.seq])
        item = known[standing.seq].item if standing.seq in known else None
        return item.custom_id if item is not None else ""

    @staticmethod
    def fields_of(level: Level) -> Mapping[str, str]:
        """Returns the fields of an item's hash that keep a level."""
        return {f"plan:{level.level}": msgspec.json.encode(level).decode()}

    async def level(self, standing: Standing, number: int) -> Level:
        """Returns a level that was planned.

        Raises:
            ProtocolError: It is not there, or cannot be read.
        """
        place = (standing.seq, standing.generation, number)
        if place not in self._levels:
            key = self._keys.item(standing.seq)
            (raw,) = await fields_of(self._pool.client, key, [f"plan:{number}"])
            try:
                self._levels[place] = msgspec.json.decode(raw or b"", type=Level)
            except msgspec.DecodeError as error:
                raise ProtocolError(
                    f"level {number} of item {standing.seq} of bulk run "
                    f"{self._keys.run} cannot be read: {error}"
                ) from error
        return self._levels[place]

    async def is_complete(self, standing: Standing, level: Level) -> bool:
        """Whether every job of a level has given its part."""
        key = self._keys.item(standing.seq)
        (done,) = await fields_of(self._pool.client, key, [f"done:{level.level}"])
        return count_of(text(done)) >= len(level.windows)

    async def parts(self, standing: Standing, level: Level) -> tuple[Part, ...]:
        """Returns the parts that a complete level gave.

        Raises:
            ProtocolError: One is missing or cannot be read.
        """
        place = (standing.seq, standing.generation, level.level)
        if place not in self._parts:
            names = [part_field(level.level, i) for i in range(len(level.windows))]
            key = self._keys.item(standing.seq)
            raw = await fields_of(self._pool.client, key, names)
            try:
                self._parts[place] = tuple(
                    msgspec.json.decode(one or b"", type=Part) for one in raw
                )
            except msgspec.DecodeError as error:
                raise ProtocolError(
                    f"parts of level {level.level} of item {standing.seq} of bulk run "
                    f"{self._keys.run} cannot be read: {error}"
                ) from error
        return self._parts[place]

    async def source(
        self, standing: Standing, document: Document, level: Level, index: int
    ) -> str:
        """Returns the text that one job summarizes."""
        first, end, _ = level.windows[index]
        if level.level == 0:
            return document.text[first:end]
        below = await self.level(standing, level.level - 1)
        parts = await self.parts(standing, below)
        return joined(parts[first:end])


def joined(parts: Sequence[Part]) -> str:
    """Returns partial summaries as one text."""
    return "\n\n".join(part.text for part in parts)
