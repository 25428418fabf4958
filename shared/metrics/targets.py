"""Where Prometheus finds the processes of a pool: a file in the form of file_sd.

`tokenmill up` keeps `metrics_targets.json` in its state directory, since the ports are
free ones and change with each start of a process.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
import structlog

from ..keys import PROCESSES, process_key
from ..outage import REDIS_ERRORS
from ..process_card import ProcessCard

if TYPE_CHECKING:
    from collections.abc import Iterable

    import redis.asyncio

FILE_NAME: Final = "metrics_targets.json"
LOOK_S: Final = 5.0
"""Between two looks at who is there."""
MOST: Final = 512
_log = structlog.get_logger(__name__)


def targets_of(cards: "Iterable[ProcessCard]") -> list[dict[str, object]]:
    """Returns file_sd's list: one entry for each process that serves metrics."""
    found: list[dict[str, object]] = []
    for card in sorted(cards, key=lambda one: (one.kind, one.id)):
        address = urlsplit(card.metrics_url or "").netloc
        if address:
            labels = {"kind": card.kind, "host": card.host}
            found.append({"targets": [address], "labels": labels})
    return found


async def keep_targets(client: "redis.asyncio.Redis", path: Path) -> None:
    """Keeps the file as the cards in Redis are, until cancelled; then removes it.

    While Redis is away the file stays: the processes still serve.
    """
    written: bytes | None = None
    try:
        while True:
            try:
                found = msgspec.json.encode(targets_of(await cards_of(client)))
                if found != written:
                    await asyncio.to_thread(_write, path, msgspec.json.format(found))
                    written = found
            except REDIS_ERRORS as error:
                _log.debug("targets_not_written", error=str(error) or repr(error))
            await asyncio.sleep(LOOK_S)
    finally:
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - one call, at the end


async def cards_of(client: "redis.asyncio.Redis") -> list[ProcessCard]:
    """Returns the cards of all processes that live; one that is no card is left out."""
    members = await client.zrevrange(PROCESSES, 0, MOST - 1)
    if not members:
        return []
    pipe = client.pipeline(transaction=False)
    for member in members:
        pipe.get(process_key(member.decode(errors="replace")))
    cards = await pipe.execute()
    found: list[ProcessCard] = []
    for raw in cards:
        with contextlib.suppress(msgspec.DecodeError):  # a stranger's
            found += [msgspec.json.decode(raw, type=ProcessCard)] if raw else []
    return found


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: Prometheus may read at any moment."""
    new = path.with_suffix(".new")
    new.write_bytes(data + b"\n")
    new.replace(path)
