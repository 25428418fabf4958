"""Runs as they are now: one record each, read in one round trip for many."""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
import redis.asyncio

from ..errors import ProtocolError
from ..redis import translate
from ..script_runner import text
from .keys import ALIVE, RUN_ID, RUNS, RunKeys
from .messages import VERSION, RunSpec, RunState, RunView

_spec_decoder: Final = msgspec.json.Decoder(RunSpec)


async def list_runs(redis: "redis.asyncio.Redis", *, limit: int = 100) -> list[RunView]:
    """Returns the newest runs, the newest first.

    Args:
        redis: Client; replies are bytes.
        limit: Most to return.
    """
    with translate():
        names = await redis.zrevrange(RUNS, 0, limit - 1)
    runs = [text(name) for name in names]
    found = await views(redis, [run for run in runs if RUN_ID.fullmatch(run)])
    return [view for view in found if view is not None]


async def orchestrator_alive(redis: "redis.asyncio.Redis") -> bool:
    """Whether a janitor has said within the last half minute that it advances runs."""
    with translate():
        return bool(await redis.exists(ALIVE))


async def views(
    redis: "redis.asyncio.Redis", runs: Sequence[str]
) -> list[RunView | None]:
    """Returns these runs as they are now; None for one that is unknown."""
    calls: list[tuple[str, ...]] = []
    for run in runs:
        keys = RunKeys(run)
        calls += (
            ("HGETALL", keys.record),
            ("SCARD", keys.open),
            ("ZCARD", keys.ready),
        )
    with translate():
        pipe = redis.pipeline(transaction=False)
        pipe.time()
        for words in calls:
            pipe.execute_command(*words)
        (seconds, micros), *rows = await pipe.execute()
    now = int(seconds) * 1000 + int(micros) // 1000
    return [
        _view(run, *three, now) if three[0] else None
        for run, three in zip(
            runs, zip(rows[0::3], rows[1::3], rows[2::3], strict=True), strict=True
        )
    ]


def _view(
    run: str, record: dict[bytes, bytes], num_open: int, num_ready: int, now: int
) -> RunView:
    fields = {text(name): text(value) for name, value in record.items()}
    try:
        spec = _spec_decoder.decode(fields.pop("spec", ""))
        # Names of the record are those of the view; what is not there has its default.
        numbers = {
            name: int(value)
            for name, value in fields.items()
            if name in RunView.__struct_fields__ and name != "state"
        }
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(
            f"the record of bulk run {run} cannot be read: {error}"
        ) from error
    if spec.v > VERSION:
        raise ProtocolError(
            f"bulk run {run} has version {spec.v}; this process reads up to "
            f"{VERSION}: upgrade tokenmill here"
        )
    state = fields.get("state", "open")
    total = numbers.get("total")
    if state == "open" and total is not None and numbers.get("settled", 0) >= total:
        state = "complete"
    return RunView(
        run=run,
        spec=spec,
        state=cast("RunState", state),
        open_jobs=num_open,
        ready_items=num_ready,
        now_ms=now,
        **numbers,
    )
