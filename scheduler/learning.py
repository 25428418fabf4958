"""What jobs make of the tokens they ask for, learned from the results of a few."""

import asyncio
from typing import Final, cast

import msgspec
import redis.asyncio
import structlog

from ..shared.keys import Keys
from ..shared.messages import JobClass, Usage

EVERY_S: Final = 2.0
SAMPLE: Final = 8
"""Newest ends that are looked at each time: a figure for fairness needs no more."""
WEIGHT: Final = 1 / 32
"""Of one job in the running mean."""
LEAST: Final = 0.01
_log = structlog.get_logger(__name__)


class _Result(msgspec.Struct):
    usage: Usage = Usage()


class MadeRatio:
    """Output tokens made for each one asked for, by class.

    Args:
        client: Redis.
        keys: The shard's names.
    """

    def __init__(self, client: "redis.asyncio.Redis", keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._seen = b"0-0"
        self.by_class: dict[JobClass, float] = {}
        """Running means; a class of which nothing was seen is absent."""

    async def run(self) -> None:
        """Learns until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(EVERY_S)

    async def step(self) -> None:
        """Looks at the newest jobs that succeeded since the last look."""
        # Entries later than the last one seen, newest first.
        rows = cast(
            "list[tuple[bytes, dict[bytes, bytes]]]",
            await self._client.xrevrange(
                self._keys.done, "+", b"(" + self._seen, count=SAMPLE
            ),
        )
        if not rows:
            return
        self._seen = rows[0][0]
        ended = [f for _, f in rows if f.get(b"state") == b"succeeded"]
        names = [f.get(b"id", b"").decode(errors="replace") for f in ended]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.hmget(self._keys.job(name), ["class", "max_tokens"])
            pipe.get(self._keys.output(name))
        replies = await pipe.execute(raise_on_error=False)
        for name, record, output in zip(
            names, replies[::2], replies[1::2], strict=True
        ):
            try:
                self._learn(cast("list[bytes]", record), cast("bytes", output))
            except (AttributeError, TypeError, ValueError) as error:
                # It has expired meanwhile, or a stranger wrote it: one sample less.
                _log.debug("result_not_counted", job=name, error=str(error))

    def _learn(self, record: list[bytes], output: bytes) -> None:
        kind, asked = record
        job_class, most = JobClass(kind.decode()), int(asked)
        made = msgspec.json.decode(output, type=_Result).usage.completion_tokens
        ratio = min(max(made / max(most, 1), LEAST), 1.0)
        before = self.by_class.get(job_class)
        mean = ratio if before is None else before + WEIGHT * (ratio - before)
        self.by_class[job_class] = mean
