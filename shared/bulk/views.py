"""Runs as they are now: one record each, read in one round trip for many."""

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
import redis.asyncio
import structlog
from redis.exceptions import ResponseError

from ..clock import time_ms
from ..errors import ProtocolError
from ..redis import translate
from ..script_runner import text
from .keys import ALIVE, RUN_ID, RUNS, RunKeys
from .messages import VERSION, RunSpec, RunState, RunView

_spec_decoder: Final = msgspec.json.Decoder(RunSpec)
_MOST_PASSED_OVER: Final = 1000
_passed_over: set[str] = set()
"""Runs that were said to be unreadable."""
_log = structlog.get_logger(__name__)


async def list_runs(redis: "redis.asyncio.Redis", *, limit: int = 100) -> list[RunView]:
    """Returns the newest runs, the newest first.

    Args:
        redis: Client; replies are bytes.
        limit: Most to return.
    """
    found, unreadable = await sorted_out(redis, limit=limit)
    for run, error in unreadable.items():
        pass_over(run, error)
    return found


async def sorted_out(
    redis: "redis.asyncio.Redis", *, limit: int
) -> tuple[list[RunView], dict[str, ProtocolError]]:
    """Returns the newest runs, the newest first, and apart what cannot be read.

    Args:
        redis: Client; replies are bytes.
        limit: Most to look at.
    """
    with translate():
        names = await redis.zrevrange(RUNS, 0, limit - 1)
    runs = [run for name in names if RUN_ID.fullmatch(run := text(name))]
    found: list[RunView] = []
    unreadable: dict[str, ProtocolError] = {}
    for run, view in zip(runs, await look(redis, runs), strict=True):
        if isinstance(view, ProtocolError):
            unreadable[run] = view
        elif view is not None:
            found.append(view)
    return found, unreadable


def pass_over(run: str, error: ProtocolError) -> None:
    """Says once of each run that it is left out, since its record cannot be read."""
    if run not in _passed_over:
        if len(_passed_over) >= _MOST_PASSED_OVER:
            _passed_over.clear()
        _passed_over.add(run)
        _log.warning(
            "bulk_run_unreadable",
            run=run,
            error=str(error),
            cure="upgrade tokenmill here if the run is of a later release; else what "
            "wrote it was not tokenmill",
        )


async def orchestrator_alive(redis: "redis.asyncio.Redis") -> bool:
    """Whether a janitor has said within the last half minute that it advances runs."""
    with translate():
        return bool(await redis.exists(ALIVE))


async def views(
    redis: "redis.asyncio.Redis", runs: Sequence[str]
) -> list[RunView | None]:
    """Returns these runs as they are now; None for one that is unknown.

    Raises:
        ProtocolError: A record is not in our format, or of a later version.
    """
    found: list[RunView | None] = []
    for view in await look(redis, runs):
        if isinstance(view, ProtocolError):
            raise view
        found.append(view)
    return found


async def look(
    redis: "redis.asyncio.Redis", runs: Sequence[str]
) -> list[RunView | ProtocolError | None]:
    """Returns these runs as they are now, each for itself.

    Args:
        redis: Client; replies are bytes.
        runs: Their ids.

    Returns:
        None for one that is unknown, an error for one that cannot be read.
    """
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
        time, *rows = await pipe.execute(raise_on_error=False)
        for reply in rows:
            if isinstance(reply, Exception) and not _is_of_another_type(reply):
                raise reply
    now = time_ms(time)
    threes = zip(rows[0::3], rows[1::3], rows[2::3], strict=True)
    return [_seen(run, three, now) for run, three in zip(runs, threes, strict=True)]


def _is_of_another_type(reply: Exception) -> bool:
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def _seen(run: str, three: Sequence[Any], now: int) -> RunView | ProtocolError | None:
    for reply in three:
        if isinstance(reply, Exception):
            return ProtocolError(f"a key of bulk run {run} is of another type: {reply}")
    record, num_open, num_ready = three
    if not record:
        return None
    try:
        return _view(run, record, num_open, num_ready, now)
    except ProtocolError as error:
        return error


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
