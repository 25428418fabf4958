"""What a model's workers say of it, and the bytes per token learned here."""

import time
from collections.abc import Mapping
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.keys import MODELS
from ..shared.messages import SCHEMA_VERSION, ModelCard, encode
from ..shared.transactions import transaction
from ..shared.version_keys import cards_key

CARD_AGE_S: Final = 2.0
"""A card is read again after this long."""
WRITE_EVERY_S: Final = 30.0
"""The learned ratio is written at most this often."""
WRITE_CHANGE: Final = 0.05
"""And only when it changed by this part."""
LEAST_TOKENS: Final = 2_000
"""Tokens seen before the ratio is believed."""
FORGET_TOKENS: Final = 1_000_000
"""Sums are halved here, so that the ratio follows what is sent now."""
_log = structlog.get_logger(__name__)


class CardReader:
    """The model card of one shard.

    Args:
        client: Redis.
        model: The model's public name.
    """

    def __init__(self, client: "redis.asyncio.Redis", model: str) -> None:
        self._client = client
        self._model = model
        self._card: ModelCard | None = None
        self._read_at = -CARD_AGE_S
        self._written_at = -WRITE_EVERY_S
        self._bytes = 0
        self._tokens = 0
        self._complained = False
        self.by_version: Mapping[str, ModelCard] = {}
        """Cards of the model's versions, where it has a route; the same object while
        they are the same."""
        self._raw_versions: dict[bytes, bytes] = {}

    @property
    def is_mixed(self) -> bool:
        """Whether versions encode prompts differently."""
        if not self.by_version:
            return False
        names = {card.tokenizer for card in self.by_version.values()}
        if self._card is not None:
            names.add(self._card.tokenizer)
        return len(names) > 1

    def for_route(self, version: str) -> ModelCard | None:
        """Returns the card of a job without a pin that goes to a version.

        It has the limits of the model, so that they do not hang on a job's id, and the
        tokenizer of the version.

        Args:
            version: That the route gives it to.
        """
        own = self.by_version.get(version)
        if own is None or self._card is None or own.tokenizer == self._card.tokenizer:
            return self._card
        return msgspec.structs.replace(self._card, tokenizer=own.tokenizer)

    def of_weights(self, weights: str) -> ModelCard | None:
        """Returns the card of the version that has these weights, if one is known."""
        cards = self.by_version.values()
        return next((card for card in cards if card.weights_version == weights), None)

    async def current(self) -> ModelCard | None:
        """Returns the card, or None while no worker has ever published one."""
        now = time.monotonic()
        if self._card is None or now - self._read_at > CARD_AGE_S:
            pipe = self._client.pipeline(transaction=False)
            pipe.hget(MODELS, self._model)
            pipe.hgetall(cards_key(self._model))
            raw, versions = await pipe.execute(raise_on_error=False)
            if isinstance(raw, Exception):
                raise raw
            self._card = self._decoded(raw)
            if isinstance(versions, Exception):
                self._complain(str(versions))
            elif versions != self._raw_versions:
                self._raw_versions = versions
                self.by_version = self._of_versions(versions)
            self._read_at = now
        return self._card

    def _of_versions(self, rows: Mapping[bytes, bytes]) -> dict[str, ModelCard]:
        found: dict[str, ModelCard] = {}
        for name, raw in rows.items():
            card = self._decoded(raw)
            if card is not None:
                found[name.decode(errors="replace")] = card
        return found

    def _decoded(self, raw: bytes | None) -> ModelCard | None:
        if raw is None:
            return None
        try:
            card = msgspec.json.decode(raw, type=ModelCard)
            if 1 <= card.v <= SCHEMA_VERSION:
                self._complained = False
                return card
            problem = f"schema version {card.v}; this process reads {SCHEMA_VERSION}"
        except (msgspec.DecodeError, RecursionError) as error:
            problem = str(error)
        self._complain(problem)
        return None

    def _complain(self, problem: str) -> None:
        if not self._complained:
            _log.error("model_card_unusable", model=self._model, error=problem)
            self._complained = True

    async def learn(self, num_bytes: int, num_tokens: int) -> None:
        """Notes sizes of tokenized payloads, and rarely writes the new ratio."""
        self._bytes += num_bytes
        self._tokens += num_tokens
        if self._tokens > FORGET_TOKENS:
            self._bytes //= 2
            self._tokens //= 2
        now = time.monotonic()
        card = self._card
        if card is None or self._tokens < LEAST_TOKENS:
            return
        ratio = round(self._bytes / self._tokens, 3)
        changed = abs(ratio - card.bytes_per_token) > WRITE_CHANGE * ratio
        if changed and now - self._written_at >= WRITE_EVERY_S:
            self._written_at = now
            await self._write(ratio)

    async def _write(self, ratio: float) -> None:
        """Replaces the ratio alone; a card that changes meanwhile is left as it is."""
        async with transaction(self._client) as pipe:
            await pipe.watch(MODELS)
            card = self._decoded(await pipe.hget(MODELS, self._model))  # type: ignore[misc]
            if card is None:
                return
            card = msgspec.structs.replace(card, bytes_per_token=ratio)
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hset(MODELS, self._model, encode(card).decode())
            try:
                await pipe.execute()
            except redis.exceptions.WatchError:
                _log.debug("model_card_changed_meanwhile", model=self._model)
                return
        self._card = card
        _log.info("bytes_per_token_learned", model=self._model, ratio=ratio)
