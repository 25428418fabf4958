"""A run in Redis, as its driver sees it: feeding, outcomes, progress, cancelling."""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
import redis.asyncio

from ..clock import redis_ms
from ..errors import InvalidRequest, ProtocolError, UnknownRun
from ..messages import encode
from ..redis import translate
from ..script_runner import Argument, text
from .checks import check_item, check_spec
from .dirty import mark_dirty
from .keys import RUN_ID, RUNS, RunKeys
from .messages import (
    FeedStatus,
    Item,
    Outcome,
    RunSpec,
    RunState,
    RunView,
)
from .scripts import call
from .views import list_runs as list_runs
from .views import look as look
from .views import orchestrator_alive as orchestrator_alive
from .views import pass_over as pass_over
from .views import sorted_out as sorted_out
from .views import views as views

KEEP_MS: Final = 604_800_000
"""How long a run stays after it was last touched, where nothing else is said."""
FEED_ITEMS: Final = 256
FEED_BYTES: Final = 4 * 1024 * 1024
"""Most of one call, unless one item alone has more."""
BLOCK_MS: Final = 2000
"""Longest single wait for an outcome: shorter than the time-out of a socket."""

_outcome_decoder: Final = msgspec.json.Decoder(Outcome)


class RunStore:
    """One run.

    Args:
        redis: A client from `shared.redis.connect`; it must not decode replies.
        run_id: From `keys.new_run_id`.
        keep_ms: How long everything of the run stays after it was last touched.

    Raises:
        InvalidRequest: `run_id` cannot be one.
    """

    def __init__(
        self, redis: "redis.asyncio.Redis", run_id: str, *, keep_ms: int = KEEP_MS
    ) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise InvalidRequest(
                "run", f"'{run_id[:80]}' cannot be a run; expected 10 of a-z and 0-9"
            )
        self.run_id = run_id
        self.keys = RunKeys(run_id)
        self._redis = redis
        self._keep_ms = keep_ms

    async def create(self, spec: RunSpec) -> bool:
        """Records the run, or goes on with it: there may be more items. Safe to repeat.

        Returns:
            False when it was there before.

        Raises:
            InvalidRequest: It was there with another spec, or a field is wrong.
            RedisUnavailable: No answer in time.
        """
        check_spec(spec)
        with translate():
            created_ms = await redis_ms(self._redis)
            await self._redis.zadd(RUNS, {self.run_id: created_ms}, nx=True)
        args = (self._keep_ms, encode(spec))
        reply = text(await call(self._redis, "bulk_create", (self.keys.record,), args))
        if reply == "other":
            raise InvalidRequest(
                "run",
                f"{self.run_id} was begun with other settings; begin a new run, or "
                "repeat the call with those that it was begun with",
            )
        return reply == "new"

    async def feed(self, items: Sequence[Item]) -> list[FeedStatus]:
        """Gives the run items. Safe to repeat.

        The caller sees to it that a bounded number is fed and not acknowledged
        (`RunView.in_redis`).

        Returns:
            For each: `new`, `known` (this generation was fed before, or an earlier
            one has not settled), or `closed` (the run is cancelled).

        Raises:
            UnknownRun: The run was never created, or has expired.
            InvalidRequest: A number of an item is out of range.
        """
        for item in items:
            check_item(item)
        encoded = [(item, encode(item)) for item in items]
        statuses: list[FeedStatus] = []
        part: list[tuple[Item, bytes]] = []
        size = 0
        for one in encoded:
            full = len(part) >= FEED_ITEMS or size + len(one[1]) > FEED_BYTES
            if part and full:
                statuses += await self._feed(part)
                part, size = [], 0
            part.append(one)
            size += len(one[1])
        if part:
            statuses += await self._feed(part)
        if "new" in statuses:
            await self._mark_dirty()
        return statuses

    async def _feed(self, items: Sequence[tuple[Item, bytes]]) -> list[FeedStatus]:
        keys = [self.keys.record, self.keys.ready, self.keys.out]
        args: list[Argument] = [self._keep_ms]
        for item, body in items:
            keys.append(self.keys.item(item.seq))
            args += (item.seq, item.generation, body, item.replaces or "")
        reply = await call(self._redis, "bulk_feed", keys, args)
        if not isinstance(reply, list):
            raise self._unknown()
        return [cast("FeedStatus", text(word)) for word in reply]

    async def outcomes(
        self, after: str = "0", *, count: int = 256
    ) -> list[tuple[str, Outcome]]:
        """Returns outcomes that are not acknowledged, in the order of settling.

        Args:
            after: The entry id of the last one seen.
            count: Most to return.

        Returns:
            Entry ids with outcomes.
        """
        with translate():
            rows = await self._redis.xrange(self.keys.out, f"({after}", count=count)
        return _decoded(rows)

    async def wait(
        self, after: str = "0", *, timeout_s: float = 2.0, count: int = 256
    ) -> list[tuple[str, Outcome]]:
        """The same, but waits for at least one while there is none.

        Args:
            after: The entry id of the last one seen; `0` begins at the start.
            timeout_s: Longest wait; at most 2 s are waited in one call.
            count: Most to return.
        """
        block = max(1, min(round(timeout_s * 1000), BLOCK_MS))
        with translate():
            found = await self._redis.xread(
                {self.keys.out: after}, count=count, block=block
            )
        return _decoded(found[0][1]) if found else []

    async def ack(self, seqs: Sequence[int]) -> int:
        """Says that the outcomes of these items are safe; they leave Redis.

        Returns:
            How many left now.
        """
        gone = 0
        for first in range(0, len(seqs), FEED_ITEMS):
            part = seqs[first : first + FEED_ITEMS]
            keys = [self.keys.record, self.keys.out, *map(self.keys.item, part)]
            reply = await call(self._redis, "bulk_ack", keys, (self._keep_ms,))
            gone += int(cast("int", reply))
        return gone

    async def set_total(self) -> None:
        """Says that all items were fed; the run is complete once they have settled.

        Raises:
            UnknownRun: The run has expired.
        """
        await self._set("total")
        await self._mark_dirty()

    async def beat(self) -> RunState:
        """Says that the driver lives, and renews the run; every few seconds is enough.

        Returns:
            The run's state, by which a driver learns of a cancel.

        Raises:
            UnknownRun: The run has expired.
        """
        return await self._set("beat")

    async def leave(self) -> RunState:
        """Says that the driver ends, before the run does or with it.

        Raises:
            UnknownRun: The run has expired.
        """
        return await self._set("leave")

    async def set_refused(self, count: int) -> RunState:
        """Says how many lines of the input could not be items.

        Raises:
            UnknownRun: The run has expired.
        """
        return await self._set("refused", count)

    async def cancel(self) -> RunState:
        """Ends the run: open jobs are cancelled, items settle as cancelled.

        Returns:
            `complete` for one that is over: there is nothing to cancel.

        Raises:
            UnknownRun: There is no such run.
        """
        state = await self._set("cancel")
        await self._mark_dirty()
        return state

    async def reopen(self) -> RunState:
        """Lets a run that was cancelled go on, as to try its items again.

        Raises:
            UnknownRun: There is no such run.
        """
        return await self._set("reopen")

    async def _set(self, what: str, *more: int) -> RunState:
        args: list[Argument] = [self._keep_ms, what, *more]
        raw = await call(self._redis, "bulk_set", self.keys.all_but_items, args)
        reply = text(raw)
        if reply == "unknown":
            raise self._unknown()
        return cast("RunState", reply)

    async def _mark_dirty(self) -> None:
        await mark_dirty(self._redis, self.run_id)

    async def view(self) -> RunView:
        """Returns the run as it is now.

        Raises:
            UnknownRun: There is no such run.
            ProtocolError: Its record is not in our format, or of a later version.
        """
        (view,) = await views(self._redis, [self.run_id])
        if view is None:
            raise self._unknown()
        return view

    def _unknown(self) -> UnknownRun:
        return UnknownRun(
            f"no record of bulk run {self.run_id}: it was never begun in this pool, or "
            "nothing has happened to it for longer than bulk.keep_s"
        )


def _decoded(
    rows: Sequence[tuple[bytes, dict[bytes, bytes]]],
) -> list[tuple[str, Outcome]]:
    found: list[tuple[str, Outcome]] = []
    for entry, fields in rows:
        try:
            found.append((text(entry), _outcome_decoder.decode(fields[b"o"])))
        except (KeyError, msgspec.DecodeError) as error:
            raise ProtocolError(
                f"the outcome {text(entry)} of a bulk run cannot be read: {error}"
            ) from error
    return found
