"""Live worker groups as the policy sees them, and who of them gets new jobs."""

import time
from collections.abc import Sequence
from typing import Final, cast

import redis.asyncio
import structlog
from redis.exceptions import ResponseError

from ..shared.errors import ProtocolError
from ..shared.keys import Keys
from ..shared.routes import Route, who_serves
from ..shared.script_types import GroupInfo
from ..shared.scripts_scheduler import group_info
from ..shared.version_keys import versions_key
from ..shared.version_records import ROUTE, decode_route
from .snapshot import GroupView, Serves
from .targets import offers_of

PREFILL_CHUNK: Final = 512
"""Prompt tokens of one engine step at most: what bounds its time."""
FRESH_S: Final = 0.01
"""Groups read along with a job's input are still right for the plan that follows;
the dispatch script checks the credit in any case."""
_log = structlog.get_logger(__name__)


class GroupReader:
    """The shard's live groups, read in one round trip, or along with another read.

    Args:
        client: Redis.
        keys: The shard's names.
    """

    def __init__(self, client: "redis.asyncio.Redis", keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._names: tuple[bytes, ...] = ()
        self._views: list[GroupView] = []
        self._fresh_until = 0.0
        self._complaints: set[str] = set()
        self._versions_key = versions_key(keys.model)
        self._raw_route: object = None
        self.route = Route()
        """As of the last read; without shares every group may have every job."""

    def commands(self) -> list[tuple[str, ...]]:
        """Returns the reads whose replies `keep` takes."""
        keys = self._keys
        groups = [
            ("HGETALL", keys.group(name.decode(errors="replace")))
            for name in self._names
        ]
        route = ("HGET", self._versions_key, ROUTE)
        return [("ZRANGE", keys.groups, "0", "-1"), route, *groups]

    async def current(self) -> list[GroupView]:
        """Returns the groups. What was read along serves once: a plan changes it."""
        for _ in range(2):  # once more when groups came that were not asked for
            if time.monotonic() < self._fresh_until:
                self._fresh_until = 0.0
                return self._views
            pipe = self._client.pipeline(transaction=False)
            for command in self.commands():
                pipe.execute_command(*command)
            self.keep(await pipe.execute(raise_on_error=False))
        return self._views

    def keep(self, replies: Sequence[object]) -> None:
        """Takes the replies to `commands`, errors included.

        Raises:
            RedisError: The list of groups could not be read.
        """
        if isinstance(replies[0], Exception):
            raise replies[0]
        if replies[1] != self._raw_route:
            self._read_route(replies[1])
        members = cast("list[bytes]", replies[0])
        known = set(self._names)
        self._names = tuple(members)
        views = [self._view(row) for row in replies[2:] if row]
        self._views = [view for view in views if view is not None]
        complete = known.issuperset(members)
        self._fresh_until = time.monotonic() + FRESH_S if complete else 0.0

    def _read_route(self, raw: object) -> None:
        """Takes a route that has changed; one that cannot be read changes nothing."""
        if isinstance(raw, Exception) and not isinstance(raw, ResponseError):
            raise raw
        try:
            if isinstance(raw, Exception):
                raise raw
            route = decode_route(cast("bytes | None", raw), self._versions_key)
        except (ResponseError, ProtocolError) as error:
            self._complain("route_unusable", error)
            return
        if route.shares != self.route.shares:
            _log.info(
                "route",
                shard=self._keys.shard,
                serial=route.serial,
                shares=who_serves(route.shares),
            )
        self._raw_route, self.route = raw, route

    def _complain(self, event: str, error: Exception) -> None:
        if str(error) not in self._complaints:
            self._complaints.add(str(error))
            _log.error(event, shard=self._keys.shard, error=str(error))

    def _view(self, row: object) -> GroupView | None:
        """What the policy needs of a group; nothing of one that a stranger wrote."""
        if isinstance(row, Exception) and not isinstance(row, ResponseError):
            raise row
        try:
            if isinstance(row, Exception):
                raise row
            return view_of(group_info(cast("dict[bytes, bytes]", row)))
        except (ResponseError, ProtocolError, ValueError) as error:
            self._complain("group_unusable", error)
            return None


def view_of(info: GroupInfo) -> GroupView | None:
    """Returns what the policy needs of a group.

    Args:
        info: The group's hash; it has expired when the group fell silent.

    Returns:
        None for a group that is draining or whose hash is not complete.
    """
    sizes = (info.total_blocks, info.max_running, info.block_size, info.batch_tokens)
    if info.state != "ready" or not info.group or min(sizes) < 1:
        return None
    running = max(info.max_running - info.credit_running, 0)
    prefill = max(info.batch_tokens - info.credit_tokens, 0)
    a, b = info.step_fit_ms
    # A class of another version of ours is none that jobs could be kept from.
    serves = cast("Serves", info.serves if info.serves in ("short", "long") else "any")
    return GroupView(
        group=info.group,
        total_blocks=info.total_blocks,
        max_running=info.max_running,
        batch_tokens=info.batch_tokens,
        block_size=info.block_size,
        max_context=info.max_context,
        free_blocks=info.credit_blocks,
        free_running=info.credit_running,
        free_tokens=info.credit_tokens,
        bulk_blocks=max(info.bulk_blocks, 0),
        bulk_running=max(info.bulk_running, 0),
        bulk_tokens=max(info.bulk_tokens, 0),
        alone=info.alone,
        serves=serves,
        schema=info.schema,
        version=info.version,
        weights=info.weights_version,
        tokenizer=info.tokenizer,
        offers=offers_of(info.version, info.weights_version),
        adapters=info.adapters,
        step_ms=max(a + b * (running + min(prefill, PREFILL_CHUNK)), 0.0),
    )
