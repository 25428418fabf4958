"""Starts and ends workers of versions beside those of the settings, as Redis says.

The settings say how the version that they name is run; Redis says whether: one that was
drained stays stopped, whatever the settings say, until it is loaded again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import redis.asyncio

from ..config_model import ModelConfig
from ..errors import ConfigError, TokenmillError
from ..outage import REDIS_ERRORS
from ..redis import translate
from ..script_runner import text
from ..version_groups import live_groups
from ..version_keys import VERSIONED
from ..versions import Versions, VersionSpec
from .lines import line
from .processes import Child, ChildSpec, ChildState

LOOK_EVERY_S: Final = 0.5
TRIES: Final = 3
"""Starts of a version's worker that may end before it has ever served."""
_RUNNING: Final = ("loading", "ready", "draining")
_REASON: Final = 400
"""Characters of a worker's last words that are recorded."""
_ENDED: Final = (ChildState.FAILED, ChildState.STOPPED)
Key = tuple[str, str]
"""Model and version."""


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
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        crew: Crew,
        plan: Callable[[ModelConfig], list[ChildSpec]],
        configured: Sequence[ModelConfig],
        partitions: int,
    ) -> None:
        self._client = client
        self._crew = crew
        self._plan = plan
        self._configured = {(one.name, one.version): one for one in configured}
        self._partitions = partitions
        self._children: dict[Key, dict[int, Child]] = {}
        self._complaint = ""

    async def stopped(self) -> set[Key]:
        """Returns the versions of the settings that are not to be started.

        One that failed is tried again: whoever starts a pool may have mended it.
        """
        found: set[Key] = set()
        for model, version in self._configured:
            versions = Versions(self._client, model)
            spec = (await versions.specs()).get(version)
            if spec is None:
                continue
            if spec.state in ("failed", "added"):
                await versions.set_state(version, "loading")
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
        """Looks once; what goes wrong is said, and met again at the next look."""
        try:
            with translate():
                await self.step()
            self._complaint = ""
        except (TokenmillError, *REDIS_ERRORS) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                line(f"warning: versions are not looked after: {error}")

    async def step(self) -> None:
        """Looks once at every model that has versions."""
        members = await self._client.smembers(VERSIONED)  # type: ignore[misc]
        for model in sorted(text(member) for member in members):
            specs = await Versions(self._client, model).specs()
            for version, spec in specs.items():
                await self._tend((model, version), spec)
            for key in [k for k in self._children if k[0] == model]:
                if key[1] not in specs and key not in self._configured:
                    await self._end(key)  # it was removed

    async def _tend(self, key: Key, spec: VersionSpec) -> None:
        children = self._children.get(key, {})
        alive = {n: one for n, one in children.items() if one.state not in _ENDED}
        failed = [one for one in children.values() if one.state is ChildState.FAILED]
        if spec.state not in _RUNNING:
            await self._end(key)
        elif failed and not alive:
            await self._note_failure(key, failed[0])
        elif spec.state == "draining":
            await self._let_end(key, spec, alive)
        else:
            for one in alive.values():
                one.keep()
            await self._fill(key, spec, {*alive, *_numbers(children, failed)})

    async def _fill(self, key: Key, spec: VersionSpec, there: set[int]) -> None:
        """Starts the replicas that are not there."""
        planned = self._planned(key, spec)
        if planned is None:
            model, version = key
            reason = self._complaint
            line(f"warning: version {version} of {model} cannot be run: {reason}")
            versions = Versions(self._client, model)
            await versions.set_state(version, "failed", reason=reason)
            return
        missing = [n for n in range(len(planned)) if n not in there]
        if not missing:
            return
        line(f"version {key[1]} of {key[0]}: starting {len(missing)} workers")
        old = [c for n, c in self._children.get(key, {}).items() if n in missing]
        await self._crew.dismiss(old)
        made = self._crew.employ([planned[n] for n in missing])
        self._children.setdefault(key, {}).update(zip(missing, made, strict=True))

    def _planned(self, key: Key, spec: VersionSpec) -> list[ChildSpec] | None:
        """Workers of a version; None, with the complaint set, where it cannot be."""
        model = self._configured.get(key, spec.model)
        try:
            return self._plan(model)
        except ConfigError as error:
            self._complaint = str(error)
            return None

    async def _let_end(
        self, key: Key, spec: VersionSpec, alive: Mapping[int, Child]
    ) -> None:
        """Workers end by themselves once they are idle; none is started again.

        After a restart of the whole pool there are none: then they are started once
        more, for jobs that were begun there.
        """
        for one in alive.values():
            one.let_end()
        if alive:
            return
        if key in self._children:
            await self._end(key)
            await self._stop_if_gone(key)
        else:
            await self._fill(key, spec, set())
            for one in self._children.get(key, {}).values():
                one.let_end()

    async def _stop_if_gone(self, key: Key) -> None:
        model, version = key
        groups = await live_groups(self._client, model, self._partitions)
        if not any(one.version == version for one in groups):
            versions = Versions(self._client, model)
            await versions.set_state(version, "stopped", only_from=("draining",))

    async def _note_failure(self, key: Key, child: Child) -> None:
        """No worker of it is left: the version has failed, for the first one's reason.

        A worker that failed its health set has said so itself, and more clearly.
        """
        model, version = key
        reason = _reason(self._crew.last_words(child.spec.name), child.exit_code)
        await self._end(key)
        groups = await live_groups(self._client, model, self._partitions)
        if any(one.version == version for one in groups):
            return  # workers on other hosts serve
        versions = Versions(self._client, model)
        await versions.set_state(version, "failed", reason=reason, only_from=_RUNNING)
        line(f"warning: version {version} of {model} has failed: {reason}")

    async def _end(self, key: Key) -> None:
        children = self._children.pop(key, {})
        await self._crew.dismiss(list(children.values()))


def _numbers(children: Mapping[int, Child], some: Sequence[Child]) -> set[int]:
    return {number for number, one in children.items() if one in some}


def _reason(words: Sequence[str], exit_code: int | None) -> str:
    """What a worker said last: its error, if there is a line of one."""
    errors = [one for one in words if one.startswith("error: ")]
    last = (errors or list(words) or ["its log says nothing"])[-1]
    said = last.removeprefix("error: ")[:_REASON]
    return f"its workers end with exit code {exit_code}: {said}"
