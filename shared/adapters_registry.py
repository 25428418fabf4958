"""The adapters of one model in Redis: added, replaced, removed, looked up.

Changes compare and write in one transaction. What was replaced or removed stays for a
while beside what is there: jobs that had begun with it go on with it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from redis.exceptions import WatchError

from .adapter_keys import adapters_key, mark_key
from .adapters import (
    RETIRED_MS,
    AdapterCard,
    key_of,
    name_in_use,
    not_theirs,
    unknown_adapter,
)
from .adapters_fit import noted
from .adapters_mark import next_mark
from .clock import time_ms
from .errors import InvalidRequest, ProtocolError
from .messages import AdapterRef, encode
from .redis import translate
from .transactions import transaction

if TYPE_CHECKING:
    import redis.asyncio

MOST_ADAPTERS: Final = 10_000
"""Of one model. What lists them reads all."""
_TRIES: Final = 20
_decoder: Final = msgspec.json.Decoder(AdapterCard)
_Answer = TypeVar("_Answer")
Entries = Mapping[bytes, bytes]
Writes = dict[str, bytes | None]
"""Field -> what is written there; None removes it."""


class Standing(msgspec.Struct, frozen=True):
    """What is known of the adapter that a job names."""

    current: AdapterCard | None
    """What stands under its name now, perhaps with other files."""
    retired: AdapterCard | None
    """The one that it names, if that was replaced or removed."""


class AdapterRegistry:
    """Adapters of one model.

    Args:
        client: Redis; replies are bytes.
        model: The model's public name.
    """

    def __init__(self, client: "redis.asyncio.Redis", model: str) -> None:
        self._redis = client
        self.model = model
        self._key, self._mark = adapters_key(model), mark_key(model)

    async def cards(self) -> list[AdapterCard]:
        """Returns those that can be used, by name.

        Raises:
            ProtocolError: An entry is no card; it is named.
        """
        with translate():
            entries = await self._redis.hgetall(self._key)  # type: ignore[misc]
        return current_cards(entries, self._key)

    async def card(self, name: str) -> AdapterCard | None:
        """Returns the card under a name.

        Raises:
            ProtocolError: The entry is no card.
        """
        with translate():
            raw = await self._redis.hget(self._key, name)  # type: ignore[misc]
        return None if raw is None else decoded(raw, self._key)

    async def standing(self, ref: AdapterRef) -> Standing:
        """Returns what is known of the adapter that a job names, in one read.

        Raises:
            ProtocolError: An entry is no card.
        """
        fields = [ref.name, _retired_field(ref)]
        raw = await self._redis.hmget(self._key, fields)  # type: ignore[misc]
        found = [None if one is None else decoded(one, self._key) for one in raw]
        return Standing(found[0], found[1])

    async def add(self, card: AdapterCard, *, replace: bool = False) -> AdapterCard:
        """Makes a name visible. The same adapter once more changes nothing but what it
        was checked on.

        Args:
            card: Of a checkpoint that was checked.
            replace: Put it in the place of another of its name, which jobs that are
                enqueued already keep. It must be for the same tenant, or for all as
                well: a name is not taken from those who use it.

        Returns:
            The card as it stands there.

        Raises:
            InvalidRequest: The name is in use, for another tenant perhaps, or there
                are too many.
        """

        def decide(entries: Entries, now_ms: int) -> tuple[AdapterCard, Writes]:
            raw = entries.get(card.name.encode())
            before = None if raw is None else decoded(raw, self._key)
            new = msgspec.structs.replace(card, added_ms=now_ms)
            if before is None:
                _require_room(entries)
            elif _same(before, new):
                again = msgspec.structs.replace(before, base=new.base, notes=new.notes)
                new = noted(again, new.checked)
                if (before.base, before.checked) == (new.base, new.checked):
                    return before, {}
            elif not replace:
                raise name_in_use(before, new)
            elif before.tenant != new.tenant:
                raise not_theirs(before, new)
            writes: Writes = {card.name: encode(new), _retired_field(new.ref): None}
            if before is not None and before.digest != new.digest:
                writes |= _retired(before, "replaced", now_ms)
            return new, writes

        return await self.change(decide)

    async def remove(self, name: str) -> AdapterCard:
        """Takes a name away: jobs that have not begun fail, the others go on.

        Returns:
            What stood there.

        Raises:
            UnknownAdapter: Nothing does.
        """

        def decide(entries: Entries, now_ms: int) -> tuple[AdapterCard, Writes]:
            raw = entries.get(name.encode())
            if raw is None:
                known = [field.decode() for field in entries if field[:1] != b"@"]
                raise unknown_adapter(self.model, name, known)
            before = decoded(raw, self._key)
            writes: Writes = {name: None, **_retired(before, "removed", now_ms)}
            for field, old in entries.items():  # what it has replaced goes with it
                if field.startswith(f"@{name}@".encode()):
                    writes |= _retired(decoded(old, self._key), "removed", now_ms)
            return before, writes

        return await self.change(decide)

    async def note(self, found: Iterable[tuple[AdapterCard, dict[str, str]]]) -> None:
        """Keeps what workers of other versions have said of adapters.

        Args:
            found: Each with weights -> why they cannot serve it; empty: they can. One
                that was replaced or removed meanwhile is left as it is.
        """
        answers = list(found)

        def decide(entries: Entries, _: int) -> tuple[None, Writes]:
            writes: Writes = {}
            for card, said in answers:
                raw = entries.get(card.name.encode())
                before = None if raw is None else decoded(raw, self._key)
                if before is not None and before.digest == card.digest:
                    new = noted(before, said)
                    writes |= {} if new == before else {card.name: encode(new)}
            return None, writes

        if answers:
            await self.change(decide)

    async def change(
        self, decide: Callable[[Entries, int], tuple[_Answer, Writes]]
    ) -> _Answer:
        """Reads, decides and writes, again where somebody has written in between.

        Args:
            decide: From all entries and the time in ms to an answer, and what is to be
                written.
        """
        with translate():
            for _ in range(_TRIES):
                async with transaction(self._redis) as pipe:
                    await pipe.watch(self._key)
                    entries = await pipe.hgetall(self._key)  # type: ignore[misc]
                    now_ms = time_ms(await pipe.time())
                    mark = await pipe.get(self._mark)
                    answer, writes = decide(entries, now_ms)
                    if not writes:
                        return answer
                    writes = {**_outlived(entries, now_ms), **writes}
                    pipe.multi()  # type: ignore[no-untyped-call]
                    self._write(pipe, writes)
                    pipe.set(self._mark, next_mark(mark))
                    try:
                        await pipe.execute()
                    except WatchError:
                        continue
                    return answer
        raise ProtocolError(
            f"{self._key} changed {_TRIES} times while it was to be written; try again"
        )

    def _write(self, pipe: Any, writes: Writes) -> None:  # noqa: ANN401 - of redis-py
        kept = {field: value for field, value in writes.items() if value is not None}
        gone = [field for field, value in writes.items() if value is None]
        if kept:
            pipe.hset(self._key, mapping=kept)
        if gone:
            pipe.hdel(self._key, *gone)


def current_cards(entries: Entries, key: str) -> list[AdapterCard]:
    """Returns the cards of a registry that can be used, by name.

    Args:
        entries: The hash.
        key: Its name, for the error.

    Raises:
        ProtocolError: An entry is no card; it is named.
    """
    cards = [decoded(raw, key) for field, raw in entries.items() if field[:1] != b"@"]
    return sorted(cards, key=lambda card: card.name)


def decoded(raw: bytes, key: str) -> AdapterCard:
    """Returns a card from Redis.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"{key} has an entry that is no card of an adapter ({error}); remove it "
            "with HDEL and add the adapter again"
        ) from None


def _retired_field(ref: AdapterRef) -> str:
    return f"@{key_of(ref)}"


def _retired(card: AdapterCard, how: str, now_ms: int) -> Writes:
    old = msgspec.structs.replace(card, retired=how, retired_ms=now_ms)
    return {_retired_field(card.ref): encode(old)}


def _outlived(entries: Entries, now_ms: int) -> Writes:
    """Entries of what was retired so long ago that no job can name it any more."""
    gone: Writes = {}
    for field, raw in entries.items():
        if field[:1] == b"@":
            retired_ms = decoded(raw, "the registry").retired_ms or 0
            if retired_ms < now_ms - RETIRED_MS:
                gone[field.decode(errors="replace")] = None
    return gone


def _same(before: AdapterCard, new: AdapterCard) -> bool:
    return (before.digest, before.path, before.tenant) == (
        new.digest,
        new.path,
        new.tenant,
    )


def _require_room(entries: Entries) -> None:
    count = sum(field[:1] != b"@" for field in entries)
    if count >= MOST_ADAPTERS:
        raise InvalidRequest(
            "name",
            f"the model has {count} adapters, as many as it may have; remove some with "
            "tokenmill lora remove",
        )
