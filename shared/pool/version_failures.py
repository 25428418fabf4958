"""What one host does about versions that it cannot load, while others may."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..version_failing import forgiven
from ..version_hosts import BEAT_EVERY_S, VersionHosts
from ..versions import Versions, VersionSpec

if TYPE_CHECKING:
    import redis.asyncio

ALONE_S: Final = 3.0
"""A version has failed once nobody else has been seen with it for so long: others look
twice a second, and may have lost Redis with all that they had said there."""
_REASON: Final = 400
"""Characters of a worker's last words that are recorded."""
Key = tuple[str, str]
"""Model and version."""


class HostFailures:
    """Versions that this host cannot load, and who else could.

    Args:
        client: Redis.
        partitions: How many the pool has.
        host: This one's name, unlike any other's.
    """

    def __init__(
        self, client: "redis.asyncio.Redis", partitions: int, host: str
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._host = host
        self._noted: dict[Key, int] = {}
        """Those that have failed here, as Redis knows -> which load has failed."""
        self._beaten_at: dict[Key, float] = {}
        self._alone_since: dict[Key, float] = {}

    async def begin(self, key: Key) -> None:
        """Says now and then that this host loads a version, or runs it."""
        now = time.monotonic()
        if key in self._noted:  # it could not be placed, and can by now
            await self._take_back(key)
            del self._noted[key]
        self._alone_since.setdefault(key, now)
        if now - self._beaten_at.get(key, float("-inf")) >= BEAT_EVERY_S:
            await self._hosts(key).beat(key[1])
            self._beaten_at[key] = now

    async def note(self, key: Key, spec: VersionSpec, reason: str) -> bool:
        """Notes that a version cannot be loaded here; called again at every look.

        Args:
            key: The version.
            spec: As it stands in Redis.
            reason: Why.

        Returns:
            Whether it has failed by that: nobody else has it, or loads it.
        """
        hosts, now = self._hosts(key), time.monotonic()
        others = await hosts.others(spec)
        if others:
            self._alone_since[key] = now
        since = self._alone_since.setdefault(key, now)
        is_last = not others and now - since >= ALONE_S
        if key in self._noted and not is_last:
            return False
        has_failed = await hosts.fails(key[1], reason, is_last=is_last)
        self._noted[key] = spec.load_ms
        self._beaten_at.pop(key, None)
        return has_failed

    async def tries_again(self, key: Key, spec: VersionSpec) -> bool:
        """Whether somebody has had a version loaded once more that has failed here.

        What was noted here is forgotten then.

        Args:
            key: The version.
            spec: As it stands in Redis.
        """
        if key in self._noted:
            again = spec.load_ms != self._noted[key]
            if again:
                self.forget(key)
            return again
        if self._host in spec.failures:  # before this process was started
            await self._take_back(key)
        return False

    def forget(self, key: Key) -> None:
        """Begins anew with a version that is not run here any more."""
        self._noted.pop(key, None)
        self._beaten_at.pop(key, None)
        self._alone_since.pop(key, None)

    async def _take_back(self, key: Key) -> None:
        await Versions(self._client, key[0]).change(forgiven(*key, self._host))

    def _hosts(self, key: Key) -> VersionHosts:
        return VersionHosts(self._client, key[0], self._partitions, self._host)


def last_error(words: Sequence[str], exit_code: int | None) -> str:
    """Returns why a worker has ended: its error, if it said one.

    Args:
        words: The end of its log.
        exit_code: Of its process.
    """
    errors = [one for one in words if one.startswith("error: ")]
    last = (errors or list(words) or ["its log says nothing"])[-1]
    said = last.removeprefix("error: ")[:_REASON]
    return f"its workers end with exit code {exit_code}: {said}"
