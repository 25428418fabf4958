"""What every wrapper of scripts needs: sending, chunking, and looking keys up."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar, cast

import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from .errors import ProtocolError, RedisUnsuitable
from .keys import SCRIPTS, SHARDS, Keys
from .redis import server_says, translate
from .script_endings import Hint
from .script_sources import load_script, script_names

CHUNK_JOBS: Final = 256
"""Most jobs in one call: Redis serves nobody else while a script runs."""
CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Most payload bytes in one call, unless one job alone has more."""
LOOKUPS: Final = 5
"""How often a script is asked again because the job moved between look and call."""
REGISTER_S: Final = 10.0
"""How often `tm:shards` is told again: a flush takes the shard out of it."""

Item = TypeVar("Item")
Argument = str | bytes | int | float


_HINT_FIELDS: Final = tuple(f for f in Hint.__struct_fields__ if f != "now_ms")


def text(value: object) -> str:
    """Returns a reply of Redis as text; nothing is the empty string."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None else str(value)


def number(value: object) -> int:
    """Returns a reply of Redis as a whole number; nothing is 0.

    Raises:
        ProtocolError: It is not a number.
    """
    if isinstance(value, int):
        return value
    try:
        return int(text(value) or 0)
    except ValueError:
        raise ProtocolError(
            f"expected a whole number from Redis, got '{text(value)[:80]}'"
        ) from None


def count_of(value: str) -> int:
    """Returns a count of a record as the scripts read it: 0 for what is no number."""
    try:
        return number(value)
    except ProtocolError:
        return 0


def broke_on_data(error: BaseException) -> bool:
    """Whether a script stopped at what it found in Redis, not at the server's state.

    One job's keys can do that; the others of the call are to go on without it.
    """
    words = str(error.__cause__ or error)
    inside = isinstance(error, RedisUnsuitable | ResponseError)
    return inside and "user_script" in words and server_says(words) is None


def chunks(
    items: Sequence[Item], size: Callable[[Item], int] | None = None
) -> Iterator[Sequence[Item]]:
    """Yields runs of at most `CHUNK_JOBS` items and `CHUNK_BYTES` bytes.

    Args:
        items: What to divide, in order.
        size: Bytes of one item; without it only the number counts.
    """
    first, total = 0, 0
    for index, item in enumerate(items):
        weight = size(item) if size else 0
        full = index - first >= CHUNK_JOBS or total + weight > CHUNK_BYTES
        if full and index > first:
            yield items[first:index]
            first, total = index, 0
        total += weight
    if first < len(items):
        yield items[first:]


class ScriptRunner:
    """Sends scripts to one shard.

    Args:
        redis: A client that does not decode replies.
        keys: The shard's names.
    """

    def __init__(self, redis: redis.asyncio.Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._registered_at = -math.inf

    @property
    def keys(self) -> Keys:
        """The shard's names."""
        return self._keys

    async def run(
        self, name: str, keys: Sequence[str], args: Sequence[Argument]
    ) -> object:
        """Runs one script and returns its raw reply.

        Args:
            name: The script's file name without its ending.
            keys: KEYS in the order of the script's header.
            args: ARGV likewise.

        Raises:
            RedisUnavailable: No answer in time.
            RedisUnsuitable: The server refuses writes.
        """
        script = load_script(name)
        with translate():
            try:
                return await self._command(
                    "EVALSHA", script.sha, len(keys), *keys, *args
                )
            except NoScriptError:
                # A restarted or flushed server: EVAL loads the source again.
                return await self._command(
                    "EVAL", script.source, len(keys), *keys, *args
                )

    async def run_in_turn(
        self, calls: Sequence[tuple[str, Sequence[str], Sequence[Argument]]]
    ) -> list[list[object]]:
        """Runs scripts that reply with arrays in this order, in one round trip.

        All are run, whatever the earlier ones replied.

        Args:
            calls: What `run` takes.
        """
        pipe = self._redis.pipeline(transaction=False)
        for index, (name, keys, args) in enumerate(calls):
            script, words = load_script(name), (len(keys), *keys, *args)
            # A script that the server has lost must not be overtaken by the next, so
            # only the last goes by its hash.
            if index + 1 < len(calls):
                pipe.execute_command("EVAL", script.source, *words)
            else:
                pipe.execute_command("EVALSHA", script.sha, *words)
        with translate():
            replies = await pipe.execute(raise_on_error=False)
        found: list[list[object]] = []
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, NoScriptError):
                found.append(await self.run_list(*call))
                continue
            if isinstance(reply, Exception):
                with translate():
                    raise reply
            found.append(_array(call[0], reply))
        return found

    async def _command(self, *words: Argument) -> object:
        # redis-py's helpers are typed for its sync client too; the raw call is not.
        reply = self._redis.execute_command(*words)  # type: ignore[no-untyped-call]
        return cast("object", await reply)

    async def run_list(
        self, name: str, keys: Sequence[str], args: Sequence[Argument]
    ) -> list[object]:
        """Runs a script that replies with an array."""
        return _array(name, await self.run(name, keys, args))

    async def register_shard(self) -> None:
        """Adds this shard to `tm:shards`, unless this instance did so just now."""
        now = time.monotonic()
        if now - self._registered_at >= REGISTER_S:
            with translate():
                await self._command("SADD", SHARDS, self._keys.shard)
            self._registered_at = now

    async def publish_sources(self) -> None:
        """Writes every script to `tm:scripts` for clients in other languages."""
        fields: list[str] = []
        for name in script_names():
            fields += (name, load_script(name).source)
        with translate():
            await self._command("HSET", SCRIPTS, *fields)

    def job_keys(self, job_id: str, tenant: str = "", idem: str = "") -> list[str]:
        """Returns the seven keys of one job in the order of `lua/lib/ending.lua`."""
        k = self._keys
        job = k.job(job_id)
        return [
            job,
            k.input(job_id),
            k.ids(job_id),
            k.output(job_id),
            k.log(job_id),
            k.wake(job_id),
            k.idempotency(tenant, idem) if idem else job,
        ]

    async def hints(self, job_ids: Sequence[str]) -> list[Hint]:
        """Returns what is needed to name the keys of these jobs, in one round trip."""
        with translate():
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            for job_id in job_ids:
                pipe.hmget(self._keys.job(job_id), list(_HINT_FIELDS))
            seconds, *rows = await pipe.execute(raise_on_error=False)
        if isinstance(seconds, Exception):
            with translate():
                raise seconds
        now = int(seconds[0]) * 1000 + int(seconds[1]) // 1000
        found: list[Hint] = []
        for row in rows:
            if isinstance(row, Exception) and not isinstance(row, ResponseError):
                with translate():
                    raise row
            # A stranger's key of another type reads as: there is no such job.
            values = map(text, row) if isinstance(row, list) else ()
            fields = dict(zip(_HINT_FIELDS, values, strict=False))
            found.append(Hint(now_ms=now, **fields))
        return found


def _array(name: str, reply: object) -> list[object]:
    if not isinstance(reply, list):
        raise ProtocolError(f"script {name} replied {reply!r:.80}, not an array")
    return reply
