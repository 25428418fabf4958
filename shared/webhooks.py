"""Webhooks as every part knows them: announcing one, and looking at deliveries.

The janitor delivers (`scheduler/webhooks.py`). Jobs announce themselves by the stream
`done`; whatever else has something to tell calls `announce`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from .errors import InvalidRequest
from .script_endings import moment
from .webhook_keys import ANNOUNCED, EVENT_ID, LOG, delivery_key
from .webhook_signing import sign as sign
from .webhook_signing import verify as verify
from .webhook_target import shown_target

if TYPE_CHECKING:
    import redis.asyncio

MOST_ANNOUNCED: Final = 100_000
"""Entries of the stream, and then the oldest go. A janitor takes each within a second;
runs advance only by one, so while none runs only batches and requests to deliver again
are announced. Jobs are not: a sweep finds those."""
MOST_EVENT_BYTES: Final = 64 * 1024
"""Of the data of one event."""
DeliveryState = Literal["pending", "delivered", "given_up"]


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an address is told."""

    id: str
    """The same however often it is announced: it is then delivered once. Letters,
    digits and `. _ : / -`."""
    type: str
    """What happened, as `batch.completed`."""
    data: Mapping[str, Any]
    """What is told of it; at most `MOST_EVENT_BYTES` as JSON."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One webhook and what became of it. Times are milliseconds of Redis' clock."""

    id: str
    """Of the event: a job's id for a job."""
    type: str = ""
    state: DeliveryState = "pending"
    target: str = ""
    """Scheme, host and port of its address; path and query may hold a secret."""
    tenant: str = ""
    attempts: int = 0
    status: int | None = None
    """HTTP status of the last answer; None when there was none."""
    error: str | None = None
    """Why the last attempt failed."""
    created_ms: int = 0
    changed_ms: int = 0
    next_ms: int | None = None
    """When it is tried again."""

    @classmethod
    def from_record(cls, event_id: str, record: Mapping[str, str]) -> "Delivery":
        """Reads the hash of a delivery."""
        state = record.get("state", "pending")
        pending = state not in ("delivered", "given_up")
        return cls(
            id=event_id,
            type=record.get("type", ""),
            state="pending" if pending else state,  # type: ignore[arg-type]
            target=shown_target(record["url"]) if record.get("url") else "",
            tenant=record.get("tenant", ""),
            attempts=moment(record.get("attempts", "")) or 0,
            status=moment(record.get("status", "")),
            error=record.get("error") or None,
            created_ms=moment(record.get("created_ms", "")) or 0,
            changed_ms=moment(record.get("changed_ms", "")) or 0,
            next_ms=moment(record.get("next_ms", "")) if pending else None,
        )


async def announce(
    client: "redis.asyncio.Redis", url: str, event: WebhookEvent | Mapping[str, Any]
) -> None:
    """Has an address told of something, at least once.

    Only so many wait (`MOST_ANNOUNCED`) until a janitor takes them.

    Args:
        client: Redis.
        url: Checked before, by `webhook_target.url_problem`.
        event: What happened; a mapping has `id` and `type`, and the rest is its data.
            Announcing the same id again changes nothing.

    Raises:
        InvalidRequest: The id cannot be one, or the data is too large.
    """
    if not isinstance(event, WebhookEvent):
        data = {name: event[name] for name in event if name not in ("id", "type")}
        event = WebhookEvent(id=event["id"], type=event["type"], data=data)
    if not EVENT_ID.fullmatch(event.id):
        raise InvalidRequest(
            "webhook",
            f"{event.id[:80]!r} cannot be the id of an event; expected 1 to 200 "
            "letters, digits and . _ : / -",
        )
    encoded = msgspec.json.encode(event.data)
    if len(encoded) > MOST_EVENT_BYTES:
        raise InvalidRequest(
            "webhook",
            f"the event has {len(encoded)} bytes; expected at most {MOST_EVENT_BYTES}",
        )
    fields = {"id": event.id, "url": url, "type": event.type, "data": encoded}
    await client.xadd(ANNOUNCED, fields, maxlen=MOST_ANNOUNCED)  # type: ignore[arg-type]


async def ask_again(client: "redis.asyncio.Redis", event_ids: Sequence[str]) -> None:
    """Has events delivered once more, whatever became of them before.

    Args:
        client: Redis.
        event_ids: Of deliveries, or of jobs that had a webhook.
    """
    pipe = client.pipeline(transaction=False)
    for event_id in event_ids:
        pipe.xadd(ANNOUNCED, {"id": event_id, "again": "1"}, maxlen=MOST_ANNOUNCED)
    if event_ids:
        await pipe.execute()


async def deliveries(
    client: "redis.asyncio.Redis",
    *,
    state: DeliveryState | None = None,
    tenant: str | None = None,
    limit: int = 50,
) -> list[Delivery]:
    """Returns deliveries, the last changed first, among the newest 10,000.

    Args:
        client: Redis.
        state: Only these.
        tenant: Only those of one tenant.
        limit: Most to return.
    """
    found: list[Delivery] = []
    page, start = 200, 0
    while len(found) < limit:
        names = await client.zrevrange(LOG, start, start + page - 1)
        rows = await find_deliveries(
            client, [name.decode(errors="replace") for name in names]
        )
        found += [
            one
            for one in rows
            if one is not None
            and state in (None, one.state)
            and tenant in (None, one.tenant)
        ]
        if len(names) < page:
            break
        start += page
    return found[:limit]


async def find_deliveries(
    client: "redis.asyncio.Redis", event_ids: Sequence[str]
) -> list[Delivery | None]:
    """Returns a delivery for each id, None where there is none (any more)."""
    pipe = client.pipeline(transaction=False)
    for event_id in event_ids:
        pipe.hgetall(delivery_key(event_id))
    rows = await pipe.execute() if event_ids else []
    return [
        Delivery.from_record(event_id, _decoded(row)) if row else None
        for event_id, row in zip(event_ids, rows, strict=True)
    ]


def _decoded(row: Mapping[bytes, bytes]) -> dict[str, str]:
    return {
        k.decode(errors="replace"): v.decode(errors="replace") for k, v in row.items()
    }
