"""A run in Redis, as the orchestrator writes it. Each call is safe to repeat."""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import redis.asyncio

from ..messages import encode
from ..redis import translate
from ..script_runner import Argument, text
from .dirty import mark_dirty
from .keys import RunKeys
from .messages import Outcome, RunState
from .scripts import call
from .store import KEEP_MS


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one item that are about to be enqueued."""

    seq: int
    generation: int
    cursor: str
    """Of the item, as last read."""
    next_cursor: str
    more: bool
    """Whether the item has jobs left that could be opened now."""
    ids: tuple[str, ...]
    fields: Mapping[str, str] = {}
    """Of the item, written with it."""
    windows: int = 0
    """Added to the run's count."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What one ended job gave its document."""

    job_id: str
    seq: int
    generation: int
    level: int
    index: int
    of: int
    """Jobs of this level."""
    value: str
    """JSON Part."""
    prompt_tokens: int
    completion_tokens: int
    fell_back: bool


class NewOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome, and what it means for the run's books."""

    outcome: Outcome
    open_ids: tuple[str, ...] = ()
    """Jobs of the item that may still be open."""
    jobs: int = 0
    """Ended with it, and not recorded before; so are the tokens of its usage."""
    count_usage: bool = True
    """False where the tokens were counted as the jobs were recorded."""


class RunWrites:
    """Writes to one run.

    Args:
        redis: Client; replies are bytes.
        run_id: The run.
        keep_ms: How long everything of the run stays after it was last touched.
    """

    def __init__(
        self, redis: "redis.asyncio.Redis", run_id: str, *, keep_ms: int = KEEP_MS
    ) -> None:
        self.keys = RunKeys(run_id)
        self._redis = redis
        self._keep_ms = keep_ms

    async def open(self, openings: Sequence[Opening]) -> list[bool]:
        """Notes jobs before they are enqueued.

        Returns:
            For each item whether it was where its cursor said.
        """
        if not openings:
            return []
        k = self.keys
        keys = [k.record, k.ready, k.open, k.unsent]
        keys += [k.item(one.seq) for one in openings]
        facts = [
            {
                "seq": one.seq,
                "generation": one.generation,
                "from": one.cursor,
                "to": one.next_cursor,
                "more": one.more,
                "ids": one.ids,
                "set": one.fields,
                "windows": one.windows,
            }
            for one in openings
        ]
        return await self._flags("bulk_open", keys, [encode(facts)])

    async def record(self, recordings: Sequence[Recording]) -> list[bool]:
        """Writes down what jobs gave their documents.

        Returns:
            For each whether it was new.
        """
        if not recordings:
            return []
        k = self.keys
        keys = [k.record, k.ready, k.open, k.unsent, k.ended]
        keys += [k.item(one.seq) for one in recordings]
        facts = [
            {
                "id": one.job_id,
                "seq": one.seq,
                "generation": one.generation,
                "field": part_field(one.level, one.index),
                "value": one.value,
                "level": one.level,
                "of": one.of,
                "prompt": one.prompt_tokens,
                "completion": one.completion_tokens,
                "fell_back": int(one.fell_back),
            }
            for one in recordings
        ]
        return await self._flags("bulk_record", keys, [encode(facts)])

    async def settle(self, outcomes: Sequence[NewOutcome]) -> list[bool]:
        """Records outcomes.

        Returns:
            For each whether its item settled now.
        """
        if not outcomes:
            return []
        k = self.keys
        keys = [k.record, k.ready, k.open, k.unsent, k.ended, k.out]
        keys += [k.item(one.outcome.seq) for one in outcomes]
        facts = [
            {
                "seq": one.outcome.seq,
                "generation": one.outcome.generation,
                "state": one.outcome.state,
                "ids": one.open_ids,
                "jobs": one.jobs,
                "prompt": one.outcome.usage.prompt_tokens * one.count_usage,
                "completion": one.outcome.usage.completion_tokens * one.count_usage,
            }
            for one in outcomes
        ]
        args = [encode(facts), *(encode(one.outcome) for one in outcomes)]
        return await self._flags("bulk_settle", keys, args)

    async def _flags(
        self, name: str, keys: Sequence[str], args: Sequence[Argument]
    ) -> list[bool]:
        reply = await call(self._redis, name, keys, (self._keep_ms, *args))
        return [bool(one) for one in cast("list[int]", reply)]

    async def mark_ended(self, job_ids: Sequence[str]) -> int:
        """Notes that these jobs have ended; how many of them are open."""
        return await self._mark(self.keys.ended, job_ids)

    async def mark_unsent(self, job_ids: Sequence[str]) -> int:
        """Notes that these jobs are not in the queue; how many of them are open."""
        return await self._mark(self.keys.unsent, job_ids)

    async def _mark(self, key: str, job_ids: Sequence[str]) -> int:
        keys = (self.keys.open, key)
        reply = await call(self._redis, "bulk_mark", keys, (self._keep_ms, *job_ids))
        return int(cast("int", reply))

    async def sent(self, job_ids: Sequence[str]) -> None:
        """Notes that these jobs have been enqueued."""
        await self._remove(self.keys.unsent, job_ids)

    async def not_ended(self, job_ids: Sequence[str]) -> None:
        """Notes that these jobs go on, or are to be sent again."""
        await self._remove(self.keys.ended, job_ids)

    async def forget(self, job_ids: Sequence[str]) -> None:
        """Takes jobs out of the books that no item waits for."""
        for key in (self.keys.open, self.keys.unsent, self.keys.ended):
            await self._remove(key, job_ids)

    async def _remove(self, key: str, members: Sequence[str]) -> None:
        if members:
            with translate():
                await cast("object", self._redis.srem(key, *members))  # type: ignore[misc]

    async def not_ready(self, seqs: Sequence[int]) -> None:
        """Takes items from the list of those with something to do."""
        if seqs:
            with translate():
                await self._redis.zrem(self.keys.ready, *seqs)

    async def ready(self, count: int) -> list[int]:
        """Returns the first items with something to be done."""
        with translate():
            found = await self._redis.zrange(self.keys.ready, 0, count - 1)
        return [int(one) for one in found]

    async def ended(self, count: int) -> list[str]:
        """Returns some of the open jobs that are known to have ended."""
        return await self._some(self.keys.ended, count)

    async def unsent(self, count: int = 1000) -> list[str]:
        """Returns some of the open jobs that may not have been enqueued."""
        return await self._some(self.keys.unsent, count)

    async def opened(self) -> list[str]:
        """Returns all open jobs."""
        with translate():
            found = await cast("object", self._redis.smembers(self.keys.open))  # type: ignore[misc]
        return sorted(text(one) for one in cast("set[bytes]", found))

    async def _some(self, key: str, count: int) -> list[str]:
        with translate():
            found = await cast("object", self._redis.srandmember(key, count))  # type: ignore[misc]
        return sorted(text(one) for one in cast("list[bytes]", found))

    async def set_cancelled(self) -> RunState:
        """Notes that everything of a run that was to be cancelled has settled."""
        return await self._set("settled")

    async def set_renewed(self) -> None:
        """Notes that the run's items were renewed."""
        await self._set("renewed")

    async def set_announced(self, end: str) -> None:
        """Notes the end that was told last."""
        await self._set("announced", end)

    async def _set(self, *words: str) -> RunState:
        args: list[Argument] = [self._keep_ms, *words]
        reply = await call(self._redis, "bulk_set", self.keys.all_but_items, args)
        return cast("RunState", text(reply))

    async def mark_dirty(self) -> None:
        """Says that there is more to do."""
        await mark_dirty(self._redis, self.keys.run)


def part_field(level: int, index: int) -> str:
    """Returns the name of an item's field that holds a partial summary."""
    return f"part:{level}:{index}"
