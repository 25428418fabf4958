"""From the name of an adapter in a prompt to the reference that its job carries."""

import time
from typing import TYPE_CHECKING, Final

from .adapters import AdapterCard, unknown_adapter
from .adapters_registry import AdapterRegistry
from .messages import AdapterRef, Prompt

if TYPE_CHECKING:
    import redis.asyncio

CARD_AGE_S: Final = 1.0
"""A card is believed for this long. Within it a job may name what was replaced or
removed meanwhile, as one that was enqueued a moment earlier does."""
_MOST_CARDS: Final = 4096


class AdapterResolver:
    """Looks adapters up for those who make jobs, and remembers them for a moment.

    Args:
        client: Redis; replies are bytes.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._redis = client
        self._cards: dict[tuple[str, str], tuple[float, AdapterCard]] = {}

    async def ref(self, prompt: Prompt) -> AdapterRef | None:
        """Returns what the job of a prompt is to carry; None without an adapter.

        Raises:
            UnknownAdapter: The model has no such adapter, or not for this tenant; the
                message lists those that it has.
        """
        if prompt.adapter is None:
            return None
        card = await self._card(prompt.model, prompt.adapter)
        if card is not None and card.is_for(prompt.tenant):
            return card.ref
        cards = await AdapterRegistry(self._redis, prompt.model).cards()
        known = [card.name for card in cards if card.is_for(prompt.tenant)]
        raise unknown_adapter(prompt.model, prompt.adapter, known)

    async def _card(self, model: str, name: str) -> AdapterCard | None:
        now = time.monotonic()
        read_at, card = self._cards.get((model, name), (-CARD_AGE_S, None))
        if card is not None and now - read_at <= CARD_AGE_S:
            return card
        card = await AdapterRegistry(self._redis, model).card(name)
        if len(self._cards) >= _MOST_CARDS:
            self._cards.clear()
        if card is None:
            self._cards.pop((model, name), None)
        else:
            self._cards[model, name] = (now, card)
        return card
