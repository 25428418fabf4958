"""Telling a run's webhook that the run has ended."""

from typing import cast

from ...shared.bulk.keys import RunKeys
from ...shared.bulk.messages import RunView
from ...shared.bulk.store import views
from ...shared.script_runner import text
from ...shared.webhooks import WebhookEvent, announce
from .pool import BulkPool

ANNOUNCED = "announced"
"""Field of a run's record: the end that was told last."""


def end_of(view: RunView) -> str | None:
    """Returns what is to be told of a run now, or None while it goes on.

    Args:
        view: The run.
    """
    if view.state not in ("complete", "cancelled"):
        return None
    return f"{view.state}:{view.total}:{view.succeeded}:{view.failed}:{view.cancelled}"


async def announce_end(pool: BulkPool, run: str) -> None:
    """Tells the webhook of a run that is complete or cancelled, once.

    After a crash it may be told again, with the same event id.

    Args:
        pool: The process's view of the pool.
        run: Its id.
    """
    (view,) = await views(pool.client, [run])
    if view is None or view.spec.webhook is None:
        return
    end = end_of(view)
    key = RunKeys(run).record
    told = await cast("object", pool.client.hget(key, ANNOUNCED))  # type: ignore[misc]
    if end is None or text(told) == end:
        return
    event = WebhookEvent(
        id=f"bulk.{run}.{end}",
        type=f"bulk.{view.state}",
        data={
            "run": run,
            "name": view.spec.name,
            "tenant": view.spec.tenant,
            "total": view.total,
            "succeeded": view.succeeded,
            "failed": view.failed,
            "cancelled": view.cancelled,
        },
    )
    await announce(pool.client, view.spec.webhook, event)
    await pool.writes(run).set_announced(end)
