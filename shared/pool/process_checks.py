"""What `tokenmill doctor` says of the pool's processes: who is there, who is seen."""

from collections import Counter

import redis.asyncio

from ..config import Config
from ..metrics.targets import cards_of
from ..redis import Finding


async def examine_processes(
    client: redis.asyncio.Redis, config: Config
) -> list[Finding]:
    """Counts processes, and names those without metrics and of unlike versions.

    Args:
        client: Redis.
        config: Settings in force.
    """
    cards = await cards_of(client)
    kinds = Counter(card.kind for card in cards)
    text = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    found = [Finding("info", "processes", text or "none has announced itself")]
    unseen = [f"{card.kind} {card.id}" for card in cards if card.metrics_url is None]
    if unseen and config.metrics.enabled:
        found.append(
            Finding(
                "warning",
                "metrics",
                f"{len(unseen)} processes serve none, the first: {unseen[0]}; its log "
                "says why (metrics_off, metrics_port_taken)",
                "pip install prometheus-client where it runs, or set metrics.enabled "
                "to false",
            )
        )
    versions = sorted({card.version for card in cards})
    if len(versions) > 1:
        found.append(
            Finding(
                "warning",
                "versions",
                f"processes of several versions run: {', '.join(versions)}",
                "finish the upgrade: restart the older ones",
            )
        )
    return found
