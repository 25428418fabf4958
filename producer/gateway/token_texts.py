"""Text of token ids, for logprobs: vocabularies come from the pool, as workers left
them there.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from ...shared.errors import InvalidRequest, ModelLoadError, ProtocolError
from ...shared.keys import tokenizer_key
from ...shared.messages import ModelCard
from ...shared.token_bundle import BYTES, unpack_tokenizer
from ...shared.token_pieces import BYTE_PIECES, TokenPieces
from ..openai_form import Spell

if TYPE_CHECKING:
    from .context import Gateway

_MOST: Final = 8
"""Vocabularies kept; one takes some ten megabytes."""
_FILE: Final = "tokenizer.json"


class TokenTexts:
    """Vocabularies of the served models.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: "Gateway") -> None:
        self._owner = owner
        self._known: dict[str, tuple[bytes, ...]] = {BYTES: BYTE_PIECES}
        self._lock = asyncio.Lock()

    async def spell(self, card: ModelCard) -> Spell:
        """Returns what gives the bytes of a model's token ids.

        Args:
            card: What a worker says of the model.

        Raises:
            InvalidRequest: Its tokens cannot be spelled here.
        """
        pieces = self._known.get(card.tokenizer)
        if pieces is None:
            async with self._lock:
                pieces = self._known.get(card.tokenizer)
                if pieces is None:
                    pieces = await self._load(card)
                    if len(self._known) >= _MOST:
                        self._known = {BYTES: BYTE_PIECES}
                    self._known[card.tokenizer] = pieces
        found = pieces
        return lambda token_id: found[token_id] if 0 <= token_id < len(found) else b""

    async def _load(self, card: ModelCard) -> tuple[bytes, ...]:
        key = tokenizer_key(card.tokenizer)
        session = self._owner.client.session
        bundle = await session.patiently(lambda: session.redis.get(key))
        if bundle is None:
            raise InvalidRequest(
                "logprobs", f"the pool has no tokenizer of '{card.model}'"
            )
        try:
            return await asyncio.to_thread(_pieces, bundle)
        except (ModelLoadError, ProtocolError) as error:
            raise InvalidRequest(
                "logprobs", f"the tokens of '{card.model}' cannot be spelled: {error}"
            ) from error


def _pieces(bundle: bytes) -> tuple[bytes, ...]:
    from tokenizers import Tokenizer

    _, files = unpack_tokenizer(bundle)
    if _FILE not in files:
        raise ModelLoadError(f"its tokenizer has no {_FILE}")
    try:
        tokenizer = Tokenizer.from_str(files[_FILE].decode())
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"its {_FILE} cannot be read: {error}") from error
    return TokenPieces(tokenizer, spell_special=True).pieces
