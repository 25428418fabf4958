"""When `tokenmill up` says that it is ready: with every model, not with the first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import msgspec
from support.waiting import wait_until

from tokenmill.shared.pool.plan import GROUP_VARIABLE
from tokenmill.shared.pool.processes import ChildState
from tokenmill.shared.pool.watching import Watcher
from tokenmill.shared.process_card import ProcessCard, make_card


class Child:
    """A child that its test moves from state to state."""

    def __init__(self, name: str, model: str | None = None) -> None:
        command = ("work", "--name", str(model), "--partition", "0")
        self.spec = SimpleNamespace(name=name, command=command, essential=True)
        self.state = ChildState.STARTING
        self.pid: int | None = 1
        self.env = {} if model is None else {GROUP_VARIABLE: f"w-{model}"}
        self.restarts = 0

    def confirm(self) -> None:
        self.state = ChildState.RUNNING

    def age_s(self) -> float:
        return 60.0


class Server:
    """Knows the groups and the processes that registered."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.cards: list[ProcessCard] = []

    async def exists(self, key: str) -> int:
        return int(any(key.endswith(group) for group in self.groups))

    async def zrevrange(self, *_: object) -> list[bytes]:
        return [card.id.encode() for card in self.cards]

    def pipeline(self, **_: object) -> Self:
        return self

    def get(self, _key: str) -> None:
        """All are read at once."""

    async def execute(self) -> list[bytes]:
        return [msgspec.json.encode(card) for card in self.cards]


class Seen:
    """A watcher over a scheduler and workers of some models, and what it said."""

    def __init__(self, *models: str, beside: Sequence[Child] = ()) -> None:
        self.server = Server()
        self.workers = {m: Child(f"worker-{i}", m) for i, m in enumerate(models)}
        self.said: list[str] = []
        self.scheduler = Child("scheduler")
        children: Any = [self.scheduler, *self.workers.values(), *beside]
        client: Any = self.server
        self.watcher = Watcher(
            client, children, lambda: self.said.append("ready"), self.said.append
        )

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.watcher.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()


async def test_it_waits_for_every_model() -> None:
    async with Seen("a", "b") as seen:
        seen.server.groups.add("w-b")
        await wait_until(lambda: seen.said == ["b"])
        assert seen.watcher.serves
        assert seen.watcher.awaited == {"a"}
        seen.server.groups.add("w-a")
        await wait_until(lambda: seen.said == ["b", "a", "ready"])


async def test_a_model_that_failed_for_good_is_not_waited_for() -> None:
    async with Seen("a", "b") as seen:
        seen.server.groups.add("w-b")
        await wait_until(lambda: seen.said == ["b"])
        seen.workers["a"].state = ChildState.FAILED
        await wait_until(lambda: seen.said == ["b", "ready"])
        assert seen.watcher.models(ChildState.FAILED) == {"a"}


async def test_a_model_that_dies_again_and_again_keeps_no_other_from_its_users() -> (
    None
):
    async with Seen("a", "b") as seen:
        seen.server.groups.add("w-b")
        await wait_until(lambda: seen.said == ["b"])
        dying = seen.workers["a"]
        dying.pid, dying.state = None, ChildState.WAITING  # once may be an accident
        assert seen.watcher.awaited == {"a"}
        dying.restarts = 1
        await wait_until(lambda: seen.said == ["b", "ready"])
        assert set(seen.watcher.failing) == {"a"}
        dying.pid, dying.state = 1, ChildState.STARTING
        seen.server.groups.add("w-a")
        await wait_until(lambda: seen.said == ["b", "ready", "a"])
        assert seen.watcher.failing == {}


async def test_without_any_model_it_is_never_ready() -> None:
    async with Seen("a") as seen:
        seen.workers["a"].state = ChildState.FAILED
        await wait_until(lambda: seen.scheduler.state is ChildState.RUNNING)
        assert not seen.watcher.serves
        assert seen.said == []


async def test_a_pool_without_workers_is_ready_with_its_scheduler() -> None:
    async with Seen() as seen:
        await wait_until(lambda: seen.said == ["ready"])


async def test_a_gateway_is_waited_for_until_its_card_is_there() -> None:
    gateway = Child("gateway")
    async with Seen(beside=[gateway]) as seen:
        other = make_card("gateway", address="http://127.0.0.1:1")
        gateway.pid = other.pid + 1
        seen.server.cards.append(other)
        await wait_until(lambda: seen.watcher.serves)
        assert seen.said == []
        seen.server.cards.append(msgspec.structs.replace(other, pid=gateway.pid))
        await wait_until(lambda: seen.said == ["ready"])
        assert gateway.state is ChildState.RUNNING


async def test_a_gateway_that_died_at_its_start_is_not_waited_for() -> None:
    gateway = Child("gateway")
    async with Seen(beside=[gateway]) as seen:
        await wait_until(lambda: seen.watcher.serves)
        gateway.restarts = 1
        await wait_until(lambda: seen.said == ["ready"])


async def test_a_version_that_is_there_first_does_not_stand_for_the_settings() -> None:
    version = Child("worker-a-v2", "a")
    version.spec.essential = False
    version.state = ChildState.RUNNING
    async with Seen("a", beside=[version]) as seen:
        await wait_until(lambda: seen.scheduler.state is ChildState.RUNNING)
        assert seen.said == []
        seen.workers["a"].restarts = 1  # it died: whoever is there serves
        await wait_until(lambda: seen.said[-1:] == ["ready"])
