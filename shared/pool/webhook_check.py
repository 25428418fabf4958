"""What `tokenmill doctor` says of webhooks and of the accounts of usage."""

from collections.abc import Sequence
from typing import Final

import redis.asyncio
import redis.exceptions

from ..config import Config
from ..keys import Keys
from ..messages import PoolCard
from ..pool_card import pool_card
from ..redis import Finding
from ..webhook_keys import ANNOUNCED, OPEN
from ..webhooks import deliveries
from .visible import hidden, if_visible, is_refused

LATE_MS: Final = 60_000
"""What is due for longer is delivered by nobody."""
NEWEST: Final = 200
"""Deliveries that are looked at."""
MANY_FIELDS: Final = 1_000_000
"""Of usage in one shard: tenants that are users of users, mostly."""
_JANITOR: Final = "start a janitor: tokenmill janitor"


async def examine_accounts(
    client: redis.asyncio.Redis,
    card: PoolCard | None,
    config: Config,
    shards: Sequence[str],
) -> list[Finding]:
    """Looks at webhooks and at usage.

    Args:
        client: Redis.
        card: What the pool tells its producers, when there is one.
        config: This host's settings.
        shards: Members of `tm:shards`.
    """
    keys = [Keys.of_shard(shard) for shard in shards]
    found = [await _settings(client, card, config, keys)]
    found += await if_visible("webhooks late", _late(client))
    found += await if_visible("webhooks given up", _given_up(client))
    return [*found, *await _usage(client, config, keys)]


async def _settings(
    client: redis.asyncio.Redis,
    card: PoolCard | None,
    config: Config,
    keys: Sequence[Keys],
) -> Finding:
    own, told = pool_card(config).webhooks, card.webhooks if card else "none"
    pipe = client.pipeline(transaction=False)
    for one in keys:
        pipe.zcard(one.webhooks)
    replies = await pipe.execute(raise_on_error=False) if keys else []
    waiting = sum(reply for reply in replies if isinstance(reply, int))
    if own == "none" and told != "none":
        return Finding(
            "info",
            "webhooks",
            f"the pool takes them, to {_reach(told)}; {waiting} jobs wait for theirs. "
            "Here is no webhooks.secret, which schedulers and the janitor alone need",
        )
    if own == "none" and waiting:
        return Finding(
            "warning",
            "webhooks",
            f"{waiting} jobs have a webhook, and the settings here have no "
            "webhooks.secret: a janitor with these settings gives their webhooks up",
            "give schedulers and the janitor the same webhooks.secret",
        )
    if card is not None and own != told:
        return Finding(
            "warning",
            "webhooks",
            f"the pool tells producers '{told}' and the settings here mean '{own}'",
            "give all schedulers and the janitor the same [webhooks], and restart them",
        )
    if own == "none":
        return Finding(
            "info", "webhooks", "none: jobs that ask for one are refused (no secret)"
        )
    return Finding(
        "info", "webhooks", f"signed, to {_reach(own)}; {waiting} jobs wait for theirs"
    )


def _reach(takes: str) -> str:
    return "any address" if takes == "any" else "addresses of the public internet"


async def _late(client: redis.asyncio.Redis) -> list[Finding]:
    seconds, _ = await client.time()
    late = await client.zcount(OPEN, "-inf", int(seconds) * 1000 - LATE_MS)
    oldest = await client.xrange(ANNOUNCED, count=1)
    waits_ms = int(seconds) * 1000 - int(oldest[0][0].split(b"-")[0]) if oldest else 0
    if not late and waits_ms < LATE_MS:
        return []
    return [
        Finding(
            "warning",
            "webhooks late",
            f"{late} deliveries are overdue and {await client.xlen(ANNOUNCED)} "
            "announcements were not taken: no janitor delivers them",
            _JANITOR,
        )
    ]


async def _given_up(client: redis.asyncio.Redis) -> list[Finding]:
    newest = await deliveries(client, limit=NEWEST)
    given_up = [one for one in newest if one.state == "given_up"]
    if not given_up:
        return []
    last = given_up[0]
    return [
        Finding(
            "warning",
            "webhooks given up",
            f"{len(given_up)} of the newest {len(newest)} deliveries; the last: "
            f"{last.target or last.id}: {last.error or 'no answer'}",
            "tokenmill webhooks list --state given_up, cure the receiver, then "
            "tokenmill webhooks redeliver --failed",
        )
    ]


async def _usage(
    client: redis.asyncio.Redis, config: Config, keys: Sequence[Keys]
) -> list[Finding]:
    pipe = client.pipeline(transaction=False)
    for one in keys:
        pipe.hlen(one.usage)
    replies = await pipe.execute(raise_on_error=False) if keys else []
    fields, found = 0, []
    for one, reply in zip(keys, replies, strict=True):
        if is_refused(reply):
            found.append(hidden(f"usage {one.shard}"))
        elif isinstance(reply, redis.exceptions.ResponseError):
            found.append(
                Finding(
                    "warning",
                    f"usage {one.shard}",
                    f"the key {one.usage} is no hash: nothing is counted",
                    "something other than tokenmill wrote it: delete it",
                )
            )
        elif isinstance(reply, int):
            fields += reply
    days = config.retention.usage_days
    text = f"{fields} days of tenants are kept, of the last {days} days"
    if fields > MANY_FIELDS:
        cure = "use fewer tenants, or a shorter retention.usage_days"
        return [*found, Finding("warning", "usage", text, cure)]
    return [*found, Finding("info", "usage", text)]
