"""Which hosts load a version, so that one on which it fails does not speak for all."""

from typing import TYPE_CHECKING, Final

from .clock import redis_ms
from .redis import translate
from .version_failing import failed_on
from .version_groups import live_groups
from .version_keys import hosts_key
from .versions import Versions, VersionSpec

if TYPE_CHECKING:
    import redis.asyncio

BEAT_EVERY_S: Final = 1.0
"""Between two signs of a host that loads or runs a version."""
GONE_MS: Final = 15_000
"""A host that has given none for so long does not load it any more."""
AWAY_MS: Final = 3_600_000
"""Nor does it come back with a version that was ready, after so long."""


class VersionHosts:
    """The hosts of one model's versions, as one of them sees the others.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
        partitions: How many the pool has.
        host: Who looks, as people know it; no other has this name.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", model: str, partitions: int, host: str
    ) -> None:
        self._client = client
        self._model = model
        self._partitions = partitions
        self._host = host

    async def beat(self, version: str) -> None:
        """Says that this host loads a version, or runs it."""
        key = hosts_key(self._model, version)
        with translate():
            now_ms = await redis_ms(self._client)
            pipe = self._client.pipeline(transaction=False)
            pipe.zadd(key, {self._host: now_ms})
            pipe.zremrangebyscore(key, "-inf", now_ms - AWAY_MS)
            pipe.pexpire(key, AWAY_MS)
            await pipe.execute()

    async def others(self, spec: VersionSpec) -> bool:
        """Whether somebody serves a version, or another host has it.

        One that loads it has to say so all the time. One on which it was ready may be
        away for a while, as for a restart, and has not failed by that. A load that was
        told since then does not wait for it.

        Args:
            spec: The version as it stands in Redis.
        """
        groups = await live_groups(self._client, self._model, self._partitions)
        if any(one.version == spec.version for one in groups):
            return True
        silent_ms = AWAY_MS if spec.state == "ready" else GONE_MS
        with translate():
            oldest = max(await redis_ms(self._client) - silent_ms, spec.load_ms)
            key = hosts_key(self._model, spec.version)
            found = await self._client.zrangebyscore(key, oldest, "+inf")
        return any(host != self._host.encode() for host in found)

    async def fails(self, version: str, reason: str, *, is_last: bool) -> bool:
        """Notes that this host cannot load a version.

        Args:
            version: Which.
            reason: Why.
            is_last: There are no others: then it has failed.

        Returns:
            Whether the version is `failed` by that.

        Raises:
            UnknownVersion: There is no such version.
        """
        with translate():
            await self._client.zrem(hosts_key(self._model, version), self._host)
        decide = failed_on(self._model, version, self._host, reason, is_last=is_last)
        _, changed = await Versions(self._client, self._model).change(decide)
        return changed and is_last
