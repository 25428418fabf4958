"""What `tokenmill doctor` says of the adapters that are registered."""

from collections.abc import Iterable, Sequence

import msgspec
import redis.asyncio

from ..adapters import AdapterCard
from ..adapters_registry import AdapterRegistry
from ..cards import ModelCard
from ..errors import ProtocolError
from ..keys import MODELS
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
            text = f"{len(cards)} registered: {_named(cards)}"
            raw = await client.hget(MODELS, model)  # type: ignore[misc]
            text += _checked_elsewhere(cards, raw)
            found.append(Finding("info", name, text))
    return found


def _named(cards: Sequence[AdapterCard]) -> str:
    names = ", ".join(card.name for card in cards[:_LISTED])
    more = f" and {len(cards) - _LISTED} more" if len(cards) > _LISTED else ""
    return f"{names}{more}"


def _checked_elsewhere(cards: Sequence[AdapterCard], raw: bytes | None) -> str:
    """Which were checked on other weights than those of the model's card, if any."""
    try:
        model = None if raw is None else msgspec.json.decode(raw, type=ModelCard)
    except msgspec.DecodeError:
        return ""  # another finding says so
    others = [card for card in cards if model and card.base != model.weights_version]
    if not others:
        return ""
    return (
        f"; checked on other weights or in another precision: {_named(others)} (if the "
        "model has changed, train them anew; `lora add` once more checks them again)"
    )
