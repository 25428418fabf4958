"""Whether a model has the version that a job is to be run by alone."""

import time
from typing import TYPE_CHECKING, Final

from ..shared.errors import InvalidRequest
from ..shared.keys import Keys
from ..shared.messages import DEFAULT_VERSION
from ..shared.routes import check_version_name
from ..shared.version_keys import versions_key
from .reading import read

if TYPE_CHECKING:
    import redis.asyncio

AGE_S: Final = 10.0
"""Versions are looked for again after this long, and where one is not found."""
_SPEC: Final = "spec:"
_MOST_MODELS: Final = 256


class Pins:
    """Knows the versions of models: registered ones, and those of live workers.

    Args:
        redis: Client; replies are bytes.
    """

    def __init__(self, redis: "redis.asyncio.Redis") -> None:
        self._redis = redis
        self._known: dict[str, tuple[float, frozenset[str]]] = {}

    async def require(self, model: str, version: str, partitions: int) -> None:
        """Checks that a model has a version. Its workers may all be away.

        Args:
            model: Public name.
            version: The job's.
            partitions: How many the pool has.

        Raises:
            InvalidRequest: There is none; the message names those there are.
        """
        check_version_name(version)
        read_at, known = self._known.get(model, (0.0, frozenset()))
        if version not in known or time.monotonic() - read_at > AGE_S:
            known = await self._read(model, partitions)
            if len(self._known) >= _MOST_MODELS:
                self._known.clear()
            self._known[model] = (time.monotonic(), known)
        if version not in known:
            raise InvalidRequest(
                "version",
                f"the model '{model}' has no version '{version}'; it has: "
                f"{', '.join(sorted(known)) or 'none'}",
            )

    async def _read(self, model: str, partitions: int) -> frozenset[str]:
        shards = [Keys(model, partition) for partition in range(partitions)]
        fields, *members = await read(
            self._redis,
            ("HKEYS", versions_key(model)),
            *(("ZRANGE", keys.groups, 0, -1) for keys in shards),
        )
        found = {
            name.decode(errors="replace").removeprefix(_SPEC)
            for name in fields
            if name.startswith(_SPEC.encode())
        }
        groups = [
            keys.group(name.decode(errors="replace"))
            for keys, names in zip(shards, members, strict=True)
            for name in names
        ]
        if groups:
            # Of a group that has just expired nothing is left.
            rows = await read(
                self._redis, *(("HMGET", key, "group", "version") for key in groups)
            )
            found |= {
                (version or DEFAULT_VERSION.encode()).decode(errors="replace")
                for group, version in rows
                if group
            }
        return frozenset(found)
