"""Sending the scripts of bulk runs, many in one round trip."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
from redis.exceptions import NoScriptError

from ..redis import translate
from ..script_runner import Argument
from ..script_sources import load_script

if TYPE_CHECKING:
    import redis.asyncio


class Call(msgspec.Struct, frozen=True):
    """One call of one script."""

    name: str
    """The script's file name without its ending."""
    keys: Sequence[str]
    args: Sequence[Argument]


async def call(
    redis: "redis.asyncio.Redis",
    name: str,
    keys: Sequence[str],
    args: Sequence[Argument],
) -> object:
    """Runs one script and returns its raw reply.

    Args:
        redis: Client; replies are bytes.
        name: The script's file name without its ending.
        keys: KEYS in the order of the script's header.
        args: ARGV likewise.

    Raises:
        RedisUnavailable: No answer in time.
        RedisUnsuitable: The server refuses.
    """
    (reply,) = await call_all(redis, [Call(name, keys, args)])
    return reply


async def call_all(redis: "redis.asyncio.Redis", calls: Sequence[Call]) -> list[object]:
    """Runs scripts in one round trip; each may be repeated, so lost ones are.

    Raises:
        RedisUnavailable: No answer in time; some may have run.
        RedisUnsuitable: The server refuses one; the others have run.
    """
    with translate():
        replies = await _send(redis, calls)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # A restarted or flushed server: it is given the sources again.
            names = {one.name for one in calls}
            pipe = redis.pipeline(transaction=False)
            for name in sorted(names):
                pipe.execute_command("SCRIPT LOAD", load_script(name).source)
            await pipe.execute()
            lost = [i for i, r in enumerate(replies) if isinstance(r, NoScriptError)]
            again = await _send(redis, [calls[i] for i in lost])
            for index, reply in zip(lost, again, strict=True):
                replies[index] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
    return replies


async def _send(redis: "redis.asyncio.Redis", calls: Sequence[Call]) -> list[object]:
    pipe = redis.pipeline(transaction=False)
    for one in calls:
        sha = load_script(one.name).sha
        pipe.execute_command("EVALSHA", sha, len(one.keys), *one.keys, *one.args)
    return cast("list[object]", await pipe.execute(raise_on_error=False))
