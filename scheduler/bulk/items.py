"""Items of a run as they stand in Redis."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import msgspec
import structlog

from ...shared.bulk.keys import RunKeys
from ...shared.bulk.messages import Item
from ...shared.redis import translate
from ...shared.script_runner import count_of, text

if TYPE_CHECKING:
    import redis.asyncio

_decoder: Final = msgspec.json.Decoder(Item)
_log = structlog.get_logger(__name__)
_FIELDS: Final = ("generation", "state", "cursor", "fed_ms")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one item stands."""

    seq: int
    generation: int
    state: str
    cursor: str
    fed_ms: int
    item: Item | None = None
    """None where it was not asked for."""

    @property
    def is_going(self) -> bool:
        """Whether it has not settled."""
        return self.state != "settled"


async def standings(
    client: "redis.asyncio.Redis",
    keys: RunKeys,
    seqs: Sequence[int],
    *,
    with_items: bool = True,
) -> dict[int, Standing]:
    """Returns the items that are there.

    Args:
        client: Redis.
        keys: The run's names.
        seqs: Which.
        with_items: Whether to read what was fed as well, which may be long.

    Returns:
        By seq. What was fed and is not in our format reads as nothing: the item then
        fails alone.
    """
    fields = [*_FIELDS, *(["item"] if with_items else [])]
    pipe = client.pipeline(transaction=False)
    for seq in seqs:
        pipe.hmget(keys.item(seq), fields)
    with translate():
        rows = await pipe.execute() if seqs else []
    found: dict[int, Standing] = {}
    for seq, row in zip(seqs, rows, strict=True):
        if row[0] is None:
            continue
        raw = row[4] if with_items else None
        found[seq] = Standing(
            seq=seq,
            generation=count_of(text(row[0])),
            state=text(row[1]),
            cursor=text(row[2]),
            fed_ms=count_of(text(row[3])),
            item=_item(keys, seq, raw) if raw is not None else None,
        )
    return found


def _item(keys: RunKeys, seq: int, raw: bytes) -> Item | None:
    try:
        return _decoder.decode(raw)
    except msgspec.DecodeError as error:
        _log.error("bulk_item_unreadable", run=keys.run, seq=seq, error=str(error))
        return None


async def fields_of(
    client: "redis.asyncio.Redis", key: str, names: Sequence[str]
) -> list[bytes | None]:
    """Returns fields of one item's hash."""
    if not names:
        return []
    with translate():
        found = await cast("object", client.hmget(key, list(names)))  # type: ignore[misc]
    return cast("list[bytes | None]", found)
