"""The newest jobs of a pool, page by page, for callers who may see a part of them."""

from collections import deque
from typing import Final

import msgspec

from ..shared.errors import InvalidRequest, ProtocolError, UnknownJob
from ..shared.keys import SHARDS, JobId, Keys, is_shard
from .info import JobInfo
from .listing import as_text
from .session import Session

_PAGE: Final = 200
"""Records per round trip."""
MOST_LOOKED_AT: Final = 5000
"""Records read for one page: who has few jobs among millions gets them in pieces."""


class JobsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some jobs, newest first."""

    jobs: list[JobInfo]
    cursor: str | None = None
    """Where the next page begins; None: there are no more."""


class Place(msgspec.Struct, frozen=True, order=True):
    """Of a job in the list: by time of enqueue, then by id."""

    at_ms: int
    job_id: str

    @classmethod
    def parse(cls, cursor: str) -> "Place":
        """Reads the cursor of a page.

        Raises:
            InvalidRequest: It is none.
        """
        at, separator, job_id = cursor.partition("-")
        if not separator or not at.isdecimal() or len(at) > 15:
            raise InvalidRequest(
                "after",
                f"{cursor[:60]!r} is no place in the list; expected the `cursor` of "
                "the page before",
            )
        return cls(int(at), job_id)

    def __str__(self) -> str:
        return f"{self.at_ms}-{self.job_id}"


class _Shard:
    """What one shard remembers of its newest jobs, read in pieces."""

    def __init__(self, session: Session, keys: Keys, before: Place | None) -> None:
        self.keys = keys
        self._session = session
        self._before = before
        self._waiting: deque[Place] = deque()
        self._last = before.at_ms if before else None
        self._num_tied = 0
        self._is_done = False

    async def head(self) -> Place | None:
        """Returns the newest job that was not taken, or None after the last."""
        while not self._waiting and not self._is_done:
            await self._read()
        return self._waiting[0] if self._waiting else None

    def take(self) -> Place:
        """Removes and returns the head."""
        return self._waiting.popleft()

    async def _read(self) -> None:
        newest = "+inf" if self._last is None else self._last
        (flat,) = await self._session.read(
            (
                *("ZREVRANGEBYSCORE", self.keys.recent, newest, "-inf", "WITHSCORES"),
                *("LIMIT", self._num_tied, _PAGE),
            )
        )
        for raw, score in zip(flat[::2], flat[1::2], strict=True):
            place = Place(int(float(score)), raw.decode(errors="backslashreplace"))
            # Those of one millisecond are counted: the next read begins behind them.
            is_tied = place.at_ms == self._last
            self._num_tied = self._num_tied + 1 if is_tied else 1
            self._last = place.at_ms
            if self._before is None or place < self._before:
                self._waiting.append(place)
        self._is_done = len(flat) < 2 * _PAGE


async def jobs_page(
    session: Session,
    *,
    limit: int,
    tenant: str | None = None,
    state: str | None = None,
    after: str | None = None,
) -> JobsPage:
    """Returns jobs by time of enqueue, newest first, of the 10,000 newest per shard.

    Args:
        session: The client's connections.
        limit: Most jobs to return. There may be fewer and yet more to come.
        tenant: Whose jobs; None takes all.
        state: Only jobs in this `State`; None takes all.
        after: The `cursor` of the page before.

    Raises:
        InvalidRequest: `after` is no cursor.
    """
    before = None if after is None else Place.parse(after)
    shards = await _shards(session, before)
    found: list[JobInfo] = []
    last: Place | None = None
    num_seen = 0
    while num_seen < MOST_LOOKED_AT:
        places = await _next(shards, _PAGE)
        if not places:
            return JobsPage(jobs=found)
        for place, info in await records(session, places):
            last, num_seen = place, num_seen + 1
            if info is None or not _matches(info, tenant, state):
                continue
            found.append(info)
            if len(found) == limit:
                return JobsPage(jobs=found, cursor=str(place))
    return JobsPage(jobs=found, cursor=str(last))


async def _shards(session: Session, before: Place | None) -> list[_Shard]:
    (members,) = await session.read(("SMEMBERS", SHARDS))
    names = sorted(m.decode(errors="replace") for m in members)
    return [_Shard(session, Keys.of_shard(n), before) for n in names if is_shard(n)]


async def _next(shards: list[_Shard], count: int) -> list[Place]:
    """The next places over all shards."""
    places: list[Place] = []
    while len(places) < count:
        newest: _Shard | None = None
        top: Place | None = None
        for shard in shards:
            head = await shard.head()
            if head is not None and (top is None or head > top):
                newest, top = shard, head
        if newest is None:
            break
        places.append(newest.take())
    return places


async def records(
    session: Session, places: list[Place]
) -> list[tuple[Place, JobInfo | None]]:
    """Returns the record of each job, None where it has expired or is nobody's."""
    keys: list[str | None] = []
    for place in places:
        try:
            keys.append(JobId.parse(place.job_id).keys.job(place.job_id))
        except UnknownJob:
            keys.append(None)  # something foreign in the index
    records = iter(
        await session.read_each(*(("HGETALL", key) for key in keys if key is not None))
    )
    return [
        (place, None if key is None else _info(place.job_id, next(records)))
        for place, key in zip(places, keys, strict=True)
    ]


def _info(job_id: str, record: dict[bytes, bytes] | ProtocolError) -> JobInfo | None:
    """A row for one record; None when it has expired or belongs to nobody known."""
    if isinstance(record, ProtocolError) or not record:
        return None
    text = as_text(record)
    try:
        return JobInfo.from_record(job_id, text)
    except ProtocolError as error:
        unreadable = JobInfo.unreadable(job_id, str(error))
        return msgspec.structs.replace(unreadable, tenant=text.get("tenant", ""))


def _matches(info: JobInfo, tenant: str | None, state: str | None) -> bool:
    return tenant in (None, info.tenant) and state in (None, info.state)
