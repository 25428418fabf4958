"""Starts and ends workers of versions beside those of the settings, as Redis says.

The settings say how the version that they name is run; Redis says whether: one that was
drained stays stopped, whatever the settings say, until it is loaded again.
"""

import asyncio
import platform
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import redis.asyncio

from ..config_model import ModelConfig
from ..errors import ConfigError, TokenmillError
from ..outage import REDIS_ERRORS
from ..redis import translate
from ..script_runner import text
from ..version_groups import live_groups, serving_partitions
from ..version_keys import VERSIONED
from ..version_life import VersionLife
from ..version_records import RUNNING
from ..version_retiring import taken_back
from ..versions import Versions, VersionSpec, VersionState
from .lines import line
from .processes import Child, ChildSpec, ChildState
from .version_failures import HostFailures, Key, last_error

LOOK_EVERY_S: Final = 0.5
TRIES: Final = 3
"""Starts of a version's worker that may end before it has ever served."""
_ENDED: Final = (ChildState.FAILED, ChildState.STOPPED)
_T = TypeVar("_T")


class Crew(Protocol):
    """What the keeper needs of the pool that it works for."""

    def employ(self, specs: Sequence[ChildSpec]) -> list[Child]:
        """Starts processes."""
        ...

    async def dismiss(self, children: Sequence[Child]) -> None:
        """Stops processes and forgets them."""
        ...

    def last_words(self, name: str) -> list[str]:
        """The end of a child's log."""
        ...


class VersionKeeper:
    """Keeps the workers of versions as their specifications in Redis say.

    Args:
        client: Redis.
        crew: Starts and stops processes.
        plan: From a version's model to its workers; the settings' own way.
        configured: Models of the settings.
        partitions: How many the pool has.
        host: Name of this one among those on the same Redis.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        crew: Crew,
        plan: Callable[[ModelConfig], list[ChildSpec]],
        configured: Sequence[ModelConfig],
        partitions: int,
        host: str,
    ) -> None:
        self._client = client
        self._crew = crew
        self._plan = plan
        self._configured = {(one.name, one.version): one for one in configured}
        self._partitions = partitions
        self._failures = HostFailures(client, partitions, host)
        self._versions: dict[str, Versions] = {}
        self._children: dict[Key, dict[int, Child]] = {}
        self._leaving: dict[Key, asyncio.Task[None]] = {}
        """Versions whose workers are being stopped."""
        self._again: Counter[Key] = Counter()
        """Times that a version which drains was started again for what it has begun."""
        self._said: dict[object, str] = {}

    async def stopped(self) -> set[Key]:
        """Returns the versions of the settings that are not to be started.

        One that failed is tried again: whoever starts a pool may have mended it.
        """
        found: set[Key] = set()
        for model, version in self._configured:
            versions = Versions(self._client, model)
            await versions.change(taken_back)  # the settings serve it
            spec = (await versions.specs()).get(version)
            if spec is None:
                continue
            if spec.state in ("failed", "added"):
                await versions.set_state(
                    version, "loading", only_from=("failed", "added")
                )
            elif spec.state == "stopped":
                found.add((model, version))
        return found

    def adopt(self, key: Key, children: Sequence[Child]) -> None:
        """Takes over workers that the settings have planned, in order of replicas."""
        if children:
            self._children[key] = dict(enumerate(children))

    async def run(self) -> None:
        """Looks until it is cancelled; an outage is said once."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks once at every model that has versions.

        What goes wrong with one model is said once, and met again at the next look.
        """
        for model in await self._tried("", self._models()) or ():
            await self._tried(model, self._tend_all(model))

    async def _tried(self, model: str, work: Awaitable[_T]) -> _T | None:
        try:
            with translate():
                found = await work
        except (TokenmillError, *REDIS_ERRORS) as error:
            whose = f"of {model} " if model else ""
            self._say(model, f"versions {whose}are not looked after: {error}")
            return None
        self._said.pop(model, None)
        return found

    def _say(self, about: object, text: str) -> None:
        """Says something once, until it is something else."""
        if self._said.get(about) != text:
            self._said[about] = text
            line(f"warning: {text}")

    async def _models(self) -> list[str]:
        members = await self._client.smembers(VERSIONED)  # type: ignore[misc]
        # Those of before as well: Redis may have lost them.
        return sorted({*map(text, members), *self._versions})

    async def _tend_all(self, model: str) -> None:
        versions = self._versions.setdefault(model, Versions(self._client, model))
        route, specs = await versions.follow()
        if not route.serial:
            del self._versions[model]  # forgotten, not lost: all of it ends
        if specs and not route.shares:
            # Before a further version is ready, which is to get no share by that.
            for own in [v for m, v in self._configured if m == model]:
                await VersionLife(self._client, model, self._partitions).settle(own)
        for version, spec in specs.items():
            await self._tend((model, version), spec)
        for key in [k for k in self._children if k[0] == model]:
            if key[1] not in specs and key not in self._configured:
                self._end(key)  # it was removed

    async def _tend(self, key: Key, spec: VersionSpec) -> None:
        if key in self._leaving:
            return
        children = self._children.get(key, {})
        alive = {n: one for n, one in children.items() if one.state not in _ENDED}
        failed = [one for one in children.values() if one.state is ChildState.FAILED]
        if spec.state != "draining":
            self._again.pop(key, None)
        if spec.state == "added" and key in self._configured:
            # Somebody describes what the settings run already.
            await self._set_state(key, "loading", only_from=("added",))
        elif spec.state not in RUNNING:
            self._end(key)
        elif spec.state == "draining":
            # Also where it has failed here: others may have served it to its end.
            await self._let_end(key, spec, alive)
        elif await self._failures.tries_again(key, spec) and not alive:
            self._end(key)
        elif failed and not alive:
            await self._note_failure(key, spec, failed[0])
        else:
            for one in alive.values():
                one.keep()
            await self._fill(key, spec, {*alive, *_numbers(children, failed)})

    async def _fill(self, key: Key, spec: VersionSpec, there: set[int]) -> None:
        """Starts the replicas that are not there."""
        try:
            planned = self._plan(self._configured.get(key, spec.model))
        except ConfigError as error:
            await self._give_up(key, spec, str(error))
            return
        if planned:
            await self._failures.begin(key)
        missing = [n for n in range(len(planned)) if n not in there]
        if not missing:
            self._said.pop(key, None)
            return
        line(f"version {key[1]} of {key[0]}: starting {len(missing)} workers")
        old = [c for n, c in self._children.get(key, {}).items() if n in missing]
        await self._crew.dismiss(old)
        made = self._crew.employ([planned[n] for n in missing])
        self._children.setdefault(key, {}).update(zip(missing, made, strict=True))
        # Whoever waits for it would start another by hand; a worker says more, later.
        starts = (
            f"tokenmill up on {platform.node()} starts its workers ({len(missing)})"
        )
        await self._set_state(key, "loading", reason=starts, only_from=("loading",))

    async def _let_end(
        self, key: Key, spec: VersionSpec, alive: Mapping[int, Child]
    ) -> None:
        """Workers end by themselves once they are idle.

        None is started again, but for jobs that were begun there and have nobody: after
        a crash, or a restart of the whole pool.
        """
        for one in alive.values():
            one.let_end()
        if alive:
            return
        model, version = key
        if not await self._is_needed(key, spec):
            self._end(key)
            groups = await live_groups(self._client, model, self._partitions)
            if not any(one.version == version for one in groups):
                await self._set_state(key, "stopped", only_from=("draining",))
        elif self._again[key] < TRIES:
            self._again[key] += 1
            await self._fill(key, spec, set())
        else:
            reason = "its workers die over the jobs that they have"
            await self._give_up(key, spec, reason)

    async def _is_needed(self, key: Key, spec: VersionSpec) -> bool:
        """Whether jobs that it has begun wait in a partition where nobody is."""
        model, version = key
        life = VersionLife(self._client, model, self._partitions)
        here = serving_partitions(await life.groups(), version)
        for partition in set(range(self._partitions)) - here:
            if await life.is_needed(version, spec.weights_version or "", partition):
                return True
        return False

    async def _note_failure(self, key: Key, spec: VersionSpec, child: Child) -> None:
        """No worker of it is left here: it has failed, for the first one's reason.

        A worker that failed its health set has said so itself, and more clearly.
        """
        words = self._crew.last_words(child.spec.name)
        await self._give_up(key, spec, last_error(words, child.exit_code))

    async def _give_up(self, key: Key, spec: VersionSpec, reason: str) -> None:
        """Notes that a version fails here; it has failed if no other host has it."""
        model, version = key
        if await self._failures.note(key, spec, reason):
            self._say(key, f"version {version} of {model} has failed: {reason}")
            self._end(key)
        else:
            self._say(key, f"version {version} of {model} fails here: {reason}")

    async def _set_state(
        self,
        key: Key,
        state: VersionState,
        *,
        reason: str = "",
        only_from: Sequence[VersionState],
    ) -> None:
        versions = Versions(self._client, key[0])
        await versions.set_state(key[1], state, reason=reason, only_from=only_from)

    def _end(self, key: Key) -> None:
        """Stops its workers, which may take a while: others are not kept waiting."""
        self._failures.forget(key)
        children = list(self._children.pop(key, {}).values())
        if children:
            self._leaving[key] = asyncio.create_task(self._dismiss(key, children))

    async def _dismiss(self, key: Key, children: Sequence[Child]) -> None:
        try:
            await self._crew.dismiss(children)
        finally:
            del self._leaving[key]


def _numbers(children: Mapping[int, Child], some: Sequence[Child]) -> set[int]:
    return {number for number, one in children.items() if one in some}
