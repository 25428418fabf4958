"""Random changes of versions and routes by several clients, against a plain model."""

import asyncio
import json

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.fake_group import card
from support.loop_machine import LoopMachine
from support.servers import RedisServer

from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import TokenmillError, UnknownVersion, VersionConflict
from tokenmill.shared.keys import MODELS, Keys
from tokenmill.shared.scripts import Scripts
from tokenmill.shared.version_keys import VERSIONED, cards_key, versions_key
from tokenmill.shared.versions import Versions, VersionSpec

MODEL = "m"
NAMES = ("v1", "v2", "v3")
STATES = ("added", "loading", "ready", "ready", "failed", "draining", "stopped")
names = st.sampled_from(NAMES)
CONTEXTS = {"v1": 4096, "v2": 1024, "v3": 8192}


class RouteMachine(LoopMachine):
    def __init__(self) -> None:
        super().__init__()
        self.versions = Versions(self.client, MODEL)
        self.scripts = Scripts(self.client, Keys(MODEL, 0))
        self.states: dict[str, str] = {}
        self.shares: dict[str, float] = {}
        self.previous: dict[str, float] = {}
        self.shadowed: dict[str, float] = {}
        self.cards: set[str] = set()
        self.serial = 0

    def tries(self, call, error: type[TokenmillError] | None) -> None:
        if error is None:
            self.do(call)
            self.serial += 1
            return
        with pytest.raises(error):
            self.do(call)

    @initialize(fixed=st.booleans())
    def begin(self, fixed) -> None:
        self.announce("v1")
        if fixed:
            self.do(self.versions.fix({"v1": 100.0}))
            self.shares, self.serial = {"v1": 100.0}, 1
            self.cards.add("v1")  # it takes that of the model along

    @rule(name=names)
    def announce(self, name) -> None:
        self.do(
            self.scripts.publish_card(
                name, card(MODEL, max_context=CONTEXTS[name], weights_version=name)
            )
        )
        if self.shares:
            self.cards.add(name)

    @rule(name=names, replace=st.booleans())
    def add(self, name, replace) -> None:
        spec = VersionSpec(version=name, model=ModelConfig(name=MODEL, version=name))
        used = (name in self.states or name in self.shares) and not replace
        self.tries(
            self.versions.add(spec, replace=replace), VersionConflict if used else None
        )
        if not used:
            self.states[name] = "added"

    @rule(name=names, state=st.sampled_from(STATES), guarded=st.booleans())
    def set_state(self, name, state, guarded) -> None:
        only_from = ("added", "loading") if guarded else None
        call = self.versions.set_state(
            name, state, only_from=only_from, weights_version=f"w-{name}"
        )
        if name not in self.states:
            with pytest.raises(UnknownVersion):
                self.do(call)
            return
        allowed = not guarded or self.states[name] in ("added", "loading")
        assert self.do(call) == allowed
        if allowed:
            self.serial += 1
            self.states[name] = state

    def refusal(self, shares) -> type[TokenmillError] | None:
        for name in sorted(shares):
            state = self.states.get(name)
            if state is None and name not in {**self.shares, **self.previous}:
                return UnknownVersion
            if state not in (None, "ready"):
                return VersionConflict
        return None

    @rule(first=names, second=names, percent=st.sampled_from([1.0, 25.0, 100.0]))
    def switch(self, first, second, percent) -> None:
        shares = {first: percent, second: 100.0 - percent}
        shares = {first: 100.0} if first == second else shares
        wanted = {name: part for name, part in shares.items() if part}
        refused = self.refusal(wanted)
        if refused is None and wanted == self.shares:
            self.do(self.versions.switch(shares))
            return
        self.tries(self.versions.switch(shares), refused)
        if refused is None:
            self.shares, self.previous = wanted, self.shares

    @rule()
    def rollback(self) -> None:
        refused = self.refusal(self.previous) if self.previous else VersionConflict
        self.tries(self.versions.rollback(), refused)
        if refused is None:
            self.shares, self.previous = self.previous, self.shares

    @rule(name=names, percent=st.sampled_from([0.0, 5.0]))
    def shadow(self, name, percent) -> None:
        refused = self.refusal({name: percent}) if percent else None
        self.tries(self.versions.shadow(name, percent), refused)
        if refused is None:
            self.shadowed.pop(name, None)
            if percent:
                self.shadowed[name] = percent

    @rule(name=names)
    def remove(self, name) -> None:
        refused: type[TokenmillError] | None = None
        if name not in self.states:
            refused = UnknownVersion
        elif name in self.shares or name in self.shadowed:
            refused = VersionConflict
        self.tries(self.versions.remove(name), refused)
        if refused is None:
            del self.states[name]
            self.cards.discard(name)
            if name in self.previous:
                self.previous = {}

    @rule(first=names, second=names)
    def two_at_once(self, first, second) -> None:
        """Of two who have read the same, both take effect, one after the other."""
        known = [name for name in (first, second) if name in self.states]
        calls = [self.versions.set_state(name, "ready") for name in known]

        async def both() -> None:
            await asyncio.gather(*calls)

        self.do(both())
        self.serial += len(known)
        self.states.update(dict.fromkeys(known, "ready"))

    @invariant()
    def redis_says_the_same(self) -> None:
        route, specs = self.do(self.versions.read())
        assert {name: spec.state for name, spec in specs.items()} == self.states
        assert (route.serial, route.shares) == (self.serial, self.shares)
        assert (route.previous, route.shadow) == (self.previous, self.shadowed)
        assert not route.shares or sum(route.shares.values()) == 100
        for name, weights in route.weights.items():
            assert weights == f"w-{name}"
            assert self.states[name] not in ("failed", "stopped")
        assert self.reader.ttl(versions_key(MODEL)) in (-1, -2)

    @invariant()
    def the_card_is_that_of_versions_with_a_share(self) -> None:
        shown = json.loads(self.reader.hget(MODELS, MODEL) or "{}")
        known = [name for name in self.shares if name in self.cards]
        if not known:
            return
        largest = max(known, key=lambda name: (self.shares[name], -NAMES.index(name)))
        assert shown["max_context"] == min(CONTEXTS[name] for name in known)
        if "v1" not in known:  # fix() may have taken it from whoever came last
            assert shown["weights_version"] == largest


@pytest.mark.timeout(120)
def test_every_order_of_changes_keeps_versions_and_route_right(
    redis_server: RedisServer,
) -> None:
    RouteMachine.url = redis_server.url
    run_state_machine_as_test(
        RouteMachine,
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


async def test_the_script_refuses_what_a_foreign_client_gets_wrong(
    redis_server: RedisServer,
) -> None:
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    versions = Versions(client, MODEL)
    for name, state in (("v1", "ready"), ("v2", "added")):
        spec = VersionSpec(version=name, model=ModelConfig(name=MODEL, version=name))
        await versions.add(spec)
        await versions.set_state(name, state)
    await versions.switch({"v1": 100})
    serial = (await versions.read())[0].serial
    keys = [versions_key(MODEL), cards_key(MODEL), MODELS, VERSIONED]
    before = await client.hgetall(keys[0])

    async def refused(shares, action="route", version="", spec="", at=None) -> str:
        route = {"serial": serial + 1, "shares": shares}
        words = [MODEL, at or serial, json.dumps(route), action, version, spec]
        status, detail = await versions._runner.run_list("route_change", keys, words)
        assert await client.hgetall(keys[0]) == before
        return f"{status.decode()} {detail.decode()}"

    assert "v2 is added; expected ready" in await refused({"v1": 50, "v2": 50})
    assert "no version v9" in await refused({"v9": 100})
    assert "90 % together" in await refused({"v1": 90})
    assert "in use" in await refused({"v1": 100}, "add", "v1", "{}")
    assert "has a share" in await refused({"v1": 100}, "remove", "v1")
    assert "no version v9" in await refused({"v1": 100}, "remove", "v9")
    assert "spec" in await refused({"v1": 100}, "set", "v1", "none")
    assert await refused({"v1": 100}, at=serial - 1) == f"changed {serial}"
    await client.set("other", "text")
    status, detail = await versions._runner.run_list(
        "route_change", ["other", *keys[1:]], [MODEL, 0, "{}", "route", "", ""]
    )
    assert (status, b"another type" in detail) == (b"refused", True)
    await client.aclose()
