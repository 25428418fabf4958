"""What `tokenmill doctor` says of the adapters that are registered."""

from collections.abc import Iterable

import redis.asyncio

from ..adapters_registry import AdapterRegistry
from ..errors import ProtocolError
from ..redis import Finding

_LISTED = 10


async def examine_adapters(
    client: "redis.asyncio.Redis", models: Iterable[str]
) -> list[Finding]:
    """Lists the adapters of each model that has some.

    Args:
        client: Redis.
        models: Public names.
    """
    found: list[Finding] = []
    for model in sorted(set(models)):
        name = f"adapters {model}"
        try:
            cards = await AdapterRegistry(client, model).cards()
        except ProtocolError as error:
            found.append(Finding("error", name, str(error), "remove that entry"))
            continue
        if cards:
            names = ", ".join(card.name for card in cards[:_LISTED])
            more = f" and {len(cards) - _LISTED} more" if len(cards) > _LISTED else ""
            text = f"{len(cards)} registered: {names}{more}"
            found.append(Finding("info", name, text))
    return found
