"""What `tokenmill doctor` says of bulk runs: which are open, and why one is stuck."""

from collections.abc import Sequence
from typing import Final

import redis.asyncio

from ..bulk.messages import RunView
from ..bulk.store import orchestrator_alive, sorted_out
from ..errors import ProtocolError
from ..redis import Finding

QUIET_MS: Final = 300_000
"""An open run in which nothing was fed or settled for this long is worth a word."""
SHOWN: Final = 20
"""Runs named one by one."""


async def examine_bulk(client: redis.asyncio.Redis) -> list[Finding]:
    """Looks at the pool's bulk runs.

    Args:
        client: Redis.
    """
    views, unreadable = await sorted_out(client, limit=1000)
    return [*await _readable(client, views), *map(_unreadable, unreadable.values())]


async def _readable(
    client: redis.asyncio.Redis, views: Sequence[RunView]
) -> list[Finding]:
    going = [view for view in views if view.state in ("open", "cancelling")]
    working = [view for view in going if view.fed > view.settled]
    if not going:
        return [Finding("info", "bulk", f"no open runs, {len(views)} kept")]
    if working and not await orchestrator_alive(client):
        names = ", ".join(view.run for view in working[:SHOWN])
        return [
            Finding(
                "error",
                "bulk",
                f"{len(working)} runs have something to do and no janitor is alive: "
                f"{names}",
                "start one: tokenmill janitor; the runs then go on where they stopped",
            )
        ]
    found = [_of(view) for view in going[:SHOWN]]
    if len(going) > SHOWN:
        found.append(Finding("info", "bulk", f"and {len(going) - SHOWN} more"))
    return found


def _unreadable(error: ProtocolError) -> Finding:
    return Finding(
        "warning",
        "bulk",
        f"{error}; it is left out everywhere and does not go on",
        "upgrade tokenmill where this is said if the run is of a later release; else "
        "something other than tokenmill wrote it: delete its keys",
    )


def _of(view: RunView) -> Finding:
    name = f"bulk {view.run}"
    total = "an unknown number" if view.total is None else str(view.total)
    text = (
        f"{view.state}: {view.settled} of {total} settled, {view.failed} failed, "
        f"{view.open_jobs} jobs open, {view.in_redis} items in Redis"
    )
    quiet_ms = view.now_ms - max(view.updated_ms, view.created_ms)
    if quiet_ms < QUIET_MS:
        fell_back = f", {view.fell_back} parts fell back" if view.fell_back else ""
        return Finding("info", name, text + fell_back)
    minutes = quiet_ms // 60_000
    if view.fed > view.settled:
        cure = (
            f"is a worker of the model {view.spec.model} alive, and does the queue "
            "move? The janitor's log names what it waits for"
        )
    else:
        cure = (
            "its driver feeds nothing more: run the same command again to go on, or "
            f"tokenmill bulk cancel {view.run}"
        )
    return Finding("warning", name, f"{text}; nothing for {minutes} minutes", cure)
