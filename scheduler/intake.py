"""From entries in Redis to ready jobs: fetch, check, tokenize, or refuse."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, cast

import redis.asyncio

from ..shared.config import Config
from ..shared.errors import NewerSchema, ProtocolError, TokenmillError
from ..shared.keys import Keys
from ..shared.messages import ModelCard
from .admitting import CHUNK_JOBS, chunks, ready_job
from .again import Again
from .bell import Bell, Ring, heard
from .cards import CardReader
from .clock import ArrivalRate, RedisClock
from .entries import Entry, Stream, named, parse_entry
from .groups import GroupReader
from .large_inputs import LargeInputs, TooNew, split, still_waiting
from .outage import REDIS_ERRORS
from .reading import LaneReader, RawEntry
from .refusing import Refuser
from .tokenizing import (
    Later,
    Outcome,
    Prepared,
    RawJob,
    TokenizerThread,
    alone,
    internal,
)
from .waiting import Ready, WaitingRoom

NOT_ARRIVALS: Final = {"room", "group"}
"""Words of the bell that bring no entry, though perhaps room for those left out."""
POLL_S: Final = 0.5
"""How often the lanes are looked at when no bell rings."""


class Intake:
    """Fills the waiting room with the jobs of one class.

    Args:
        client: Redis.
        keys: The shard's names.
        reader: The lanes of this class.
        groups: Read along with the inputs, for the plan that follows.
        room: Where ready jobs go.
        tokenizers: The process's tokenizer thread.
        cards: The model's card.
        refuser: Ends what can never run.
        clock: The clock of Redis.
        arrivals: Counts new jobs.
        buckets: Upper bounds of the length buckets.
        max_bytes: Longest payload.
        changed: Set when jobs became ready.
        config: Where inputs are that requests name; after how many lost leases a job
            runs alone.
        too_new: Told of jobs that only a newer scheduler can read.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        keys: Keys,
        reader: LaneReader,
        groups: GroupReader,
        room: WaitingRoom,
        tokenizers: TokenizerThread,
        cards: CardReader,
        refuser: Refuser,
        clock: RedisClock,
        arrivals: ArrivalRate,
        buckets: tuple[int, ...],
        max_bytes: int,
        changed: asyncio.Event,
        config: Config,
        too_new: TooNew,
    ) -> None:
        self._client = client
        self._keys = keys
        self._reader = reader
        self._groups = groups
        self._room = room
        self._tokenizers = tokenizers
        self._cards = cards
        self._refuser = refuser
        self._clock = clock
        self._arrivals = arrivals
        self._buckets = buckets
        self._max_bytes = max_bytes
        self._changed = changed
        self._isolate_after = config.scheduler.isolate_after_losses
        self._large = LargeInputs(
            config,
            self._take_fetched,
            self._refuse,
            partial(still_waiting, client, keys),
            room.unfetched,
        )
        self._too_new = too_new
        self._again = Again(client, keys, room, reader.job_class)
        self.bell = Bell(self._concerned)
        self._named: list[str] = []
        """Jobs that the bell has named: their inputs are read with their entries."""
        self._inputs: dict[str, bytes | None] = {}

    def _concerned(self, ring: Ring) -> bool:
        mine = [name for kind, name in ring.arrivals if kind == self._reader.job_class]
        if len(self._named) < CHUNK_JOBS:
            self._named += mine
        if ring.arrivals:
            return bool(mine)
        return self._reader.held_back or ring.word not in NOT_ARRIVALS

    async def run(self) -> None:
        """Reads whenever the bell rings, and now and then, until cancelled."""
        try:
            while True:
                self.bell.clear()
                # What arrives after a read rings again; what a read left does not.
                while await self.step():
                    pass
                self._large.check()
                await heard(self.bell, POLL_S)
        finally:
            self._again.close()
            await self._large.close()

    async def step(self) -> bool:
        """Takes in what can be read now; whether more is left."""
        card = await self._cards.current()
        if card is None or not await self._tokenizers.ready(self._client, card):
            return False
        if self._cards.by_version or len(self._again):
            for entry in await self._again.due(self._cards, self._tokenizers):
                await self._take_in([entry], card)
        raw = await self._read()
        for chunk in chunks(await self._parsed(raw)):
            await self._take_in(chunk, card)
        return self._reader.full

    async def _read(self) -> list[RawEntry]:
        """Reads entries, and with them all that a plan needs of jobs the bell named."""
        named, self._named, self._inputs = self._named, [], {}
        along: list[tuple[str, ...]] = []
        if named:
            inputs = (self._keys.input(job_id) for job_id in named)
            along = [("MGET", *inputs), *self._groups.commands()]
        entries, replies = await self._reader.read(along)
        if named:
            if isinstance(replies[0], Exception):
                raise replies[0]
            payloads = cast("list[bytes | None]", replies[0])
            self._inputs = dict(zip(named, payloads, strict=True))
            self._groups.keep(replies[1:])
        return entries

    async def _parsed(self, raw: Sequence[RawEntry]) -> list[Entry]:
        entries: list[Entry] = []
        now_ms = self._clock.now_ms()
        for one in raw:
            entry = alone(partial(self._entry, now_ms, *one))
            if isinstance(entry, Entry):
                entries.append(entry)
                continue
            stream, entry_id, fields = one
            place = (stream.key, entry_id.decode())
            await self._refuser.bury(place, entry, named(fields))
        return entries

    def _entry(
        self,
        now_ms: int,
        stream: Stream,
        entry_id: bytes,
        fields: Mapping[bytes, bytes],
    ) -> Entry:
        entry = parse_entry(self._keys, stream, entry_id, fields, now_ms)
        if entry.job_id in self._room and not entry.resumed:
            raise ProtocolError(f"job {entry.job_id} is in a lane already")
        return entry

    async def _prepared(self, raw: Sequence[RawJob], card: ModelCard) -> list[Outcome]:
        """Prepares all at once, and one by one when that fails as a whole."""
        try:
            return await self._tokenizers.prepare(
                raw, card, self._max_bytes, self._cards.by_version
            )
        except REDIS_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - no job may stop the others
            if len(raw) == 1:
                return [internal("preparing the job", error)]
        return [(await self._prepared([job], card))[0] for job in raw]

    async def _take_in(self, entries: Sequence[Entry], card: ModelCard) -> None:
        raw, known, away = split(*await self._fetch(entries))
        for entry, job, ref in away:
            self._large.start(entry, job, ref, card)
        await self._admit(raw, known, card)

    async def _take_fetched(self, entry: Entry, job: RawJob, card: ModelCard) -> None:
        await self._admit([job], [entry], card)

    async def _admit(
        self, raw: Sequence[RawJob], known: Sequence[Entry], card: ModelCard
    ) -> None:
        """Lets jobs whose input is here into the waiting room, or refuses them."""
        outcomes = await self._prepared(raw, card)
        refused: list[tuple[Entry, TokenmillError]] = []
        num_bytes = num_tokens = 0
        for entry, outcome in zip(known, outcomes, strict=True):
            if isinstance(outcome, Later):
                self._again.keep(entry, outcome.tokenizer)
                continue
            if not isinstance(outcome, Prepared):
                refused.append((entry, outcome))
                continue
            ready = alone(
                partial(ready_job, entry, outcome, self._buckets, self._isolate_after)
            )
            if not isinstance(ready, Ready):
                refused.append((entry, ready))
                continue
            if self._cards.is_mixed:
                # The route may have moved while an input was on its way.
                wanted = self._again.tokenizer_for(ready, self._cards)
                if wanted:
                    self._again.keep(entry, wanted)
                    continue
            self._room.add(ready)
            num_bytes += outcome.text_bytes
            num_tokens += outcome.tokens if outcome.text_bytes else 0
        self._arrivals.add(len(known))
        if len(refused) < len(known):
            self._changed.set()
        for entry, error in refused:
            await self._refuse(entry, error)
        await self._cards.learn(num_bytes, num_tokens)

    async def _refuse(self, entry: Entry, error: TokenmillError) -> None:
        place = (entry.stream, entry.entry_id)
        if isinstance(error, NewerSchema):
            self._too_new.leave(entry.job_id, error)
            return
        if isinstance(error, ProtocolError):
            await self._refuser.bury(place, error, "")
        await self._refuser.fail(entry.job_id, error, place)

    async def _fetch(
        self, entries: Sequence[Entry]
    ) -> tuple[list[RawJob], list[Entry]]:
        """Reads payloads (and ids of resumed jobs); buries entries without one."""
        here = [self._inputs.get(entry.job_id) for entry in entries]
        if all(here) and not any(entry.resumed for entry in entries):
            raw = [
                RawJob(payload, None, card=self._card_for(entry))
                for entry, payload in zip(entries, here, strict=True)
                if payload
            ]
            return raw, list(entries)
        names = [self._keys.input(entry.job_id) for entry in entries]
        resumed = [entry for entry in entries if entry.resumed]
        names += [self._keys.ids(entry.job_id) for entry in resumed]
        values = cast("list[bytes | None]", await self._client.mget(names))
        ids = dict(
            zip([e.job_id for e in resumed], values[len(entries) :], strict=True)
        )
        raw = []
        known: list[Entry] = []
        for entry, payload in zip(entries, values[: len(entries)], strict=True):
            if payload is None:
                error = ProtocolError(f"there is no input of job {entry.job_id}")
                await self._refuse(entry, error)
                continue
            mixed = self._cards.is_mixed and not entry.weights
            # Ids that another version's tokenizer may have made are made anew.
            known_ids = None if mixed else ids.get(entry.job_id)
            raw.append(RawJob(payload, known_ids, card=self._card_for(entry)))
            known.append(entry)
        return raw, known

    def _card_for(self, entry: Entry) -> ModelCard | None:
        """What a job of its version is prepared with; None: as one of the model."""
        if entry.weights:
            # Another version may hold less by now: what was begun goes on.
            return self._cards.of_weights(entry.weights)
        if not self._cards.is_mixed:
            return None
        return self._cards.for_route(self._room.targets.version_of(entry.job_id))
