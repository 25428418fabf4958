"""Asking a live worker of a model whether it could serve an adapter.

The worker has the model, sees the directory as it would later, and reads every value:
what it accepts is registered, and nothing else.
"""

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Final

import msgspec

from ...shared.adapter_keys import check_key, verdict_key
from ...shared.adapters import CHECK, AdapterCheck, AdapterVerdict
from ...shared.errors import ModelUnavailable, ProtocolError, ResultTimeout
from ...shared.keys import Keys
from ...shared.messages import encode
from ...shared.version_groups import live_groups
from ...shared.versions import Versions

if TYPE_CHECKING:
    from ..session import Session

CHECK_S: Final = 120.0
"""Longest wait for a verdict: adapters may come over a slow network."""
_KEPT_MS: Final = 300_000
_ASK_AGAIN_S: Final = 2.0
"""A word on a channel may be lost, and a worker may leave: another is asked then, and
each time after twice as long, as it may also be that the files come slowly."""
_POLL_S: Final = 0.05


async def verdict_of(
    session: "Session",
    model: str,
    path: str,
    timeout_s: float = CHECK_S,
    *,
    version: str | None = None,
) -> AdapterVerdict:
    """Has a worker read a checkpoint.

    Args:
        session: The client's connections.
        model: Public name of the base model.
        path: Directory of the checkpoint, as workers see it.
        timeout_s: Longest wait.
        version: Whose workers to ask; None: those that get most of the jobs.

    Raises:
        ModelUnavailable: No live worker serves the model.
        ResultTimeout: None has answered in time.
    """
    check_id = secrets.token_hex(16)
    request = encode(AdapterCheck(path=path))
    await session.patiently(
        lambda: session.redis.set(check_key(check_id), request, px=_KEPT_MS)
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await _answer(session, model, check_id, version)
    except TimeoutError:
        raise ResultTimeout(
            f"no worker of '{model}' has checked the adapter in {timeout_s:g} s; look "
            "at the workers' logs (a worker of an older release does not answer)"
        ) from None


async def _answer(
    session: "Session", model: str, check_id: str, version: str | None
) -> AdapterVerdict:
    ask_at, turn = 0.0, 0
    while True:
        if time.monotonic() >= ask_at:
            heard = await _ask(session, model, check_id, turn, version)
            ask_at = time.monotonic() + _ASK_AGAIN_S * 2**turn
            turn += heard
        (raw,) = await session.read(("GET", verdict_key(check_id)))
        if raw is not None:
            return _decoded(raw)
        await asyncio.sleep(_POLL_S)


async def _ask(
    session: "Session", model: str, check_id: str, turn: int, version: str | None
) -> bool:
    """Tells one worker that there is something to check, another one each time.

    False where nobody has heard it.
    """
    places = await channels(session, model, version)
    if not places:
        raise ModelUnavailable(
            f"the model '{model}' has no live worker, and it is a worker that checks "
            "an adapter before its name becomes visible",
            "Start one, then register the adapter",
        )
    word = f"{CHECK}{check_id}"
    for offset in range(len(places)):
        channel = places[(turn + offset) % len(places)]
        heard = await session.patiently(
            lambda: session.redis.publish(channel, word)  # noqa: B023
        )
        if heard:
            return True
    return False


async def channels(
    session: "Session", model: str, version: str | None = None
) -> list[str]:
    """Returns the control channels of the live workers that get most of a model's jobs.

    Another version may have other layers, and what it refuses or takes says nothing.

    Args:
        session: The client's connections.
        model: Public name of the base model.
        version: Those of this one instead.
    """
    pool = await session.patiently(session.view.pool)
    groups = await session.patiently(
        lambda: live_groups(session.redis, model, pool.partitions)
    )
    route = await session.patiently(Versions(session.redis, model).route)
    if version is None and route is not None:
        version = max(route.shares, key=lambda name: route.shares[name])
    if version is not None:
        groups = [one for one in groups if one.version == version]
    return [
        Keys(model, one.partition).control(one.group)
        for one in groups
        if not one.draining
    ]


def _decoded(raw: bytes) -> AdapterVerdict:
    try:
        return msgspec.json.decode(raw, type=AdapterVerdict)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a worker's verdict cannot be read: {error}") from error
