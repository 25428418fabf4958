"""What a version's record says while a worker loads and checks it."""

import asyncio
import os
import platform
from types import SimpleNamespace
from typing import Any

import pytest
from support.shard_client import KEYS

from tokenmill.producer.models.info import version_infos
from tokenmill.producer.models.operations import _progress
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import HealthFailed
from tokenmill.shared.health_set import parse_health_set
from tokenmill.shared.messages import ModelCard
from tokenmill.shared.versions import Versions, VersionSpec
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.own_version import OwnVersion

MODEL = KEYS.model
CARD = ModelCard(
    model=MODEL,
    max_context=128,
    vocab_size=257,
    tokenizer="bytes",
    has_chat_template=True,
    weights_version="w",
)
WHERE = f"worker a on {platform.node()}, pid {os.getpid()}, "


class Asking(EchoEngine):
    """Looks at the record while its version is checked."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self._look, self._loop = look, asyncio.get_running_loop()
        self.seen: list[str] = []

    def step(self) -> Any:
        said = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        self.seen.append(said.result())
        return super().step()


async def record(versions: Versions, expected: bytes) -> None:
    checks = parse_health_set(b'{"prompt": "a", "exact": "%s"}' % expected, "set")
    model = ModelConfig(name=MODEL)
    spec = VersionSpec(version="v1", model=model, state="loading", health=checks)
    await versions.add(spec)


def loaded(engine: EchoEngine) -> Any:
    return SimpleNamespace(engine=engine, card=CARD, bundle=None, runner=None)


async def test_a_worker_says_that_it_loads_and_that_it_checks(empty_redis) -> None:
    versions = Versions(empty_redis, MODEL)
    await record(versions, b"a")

    async def reason() -> str:
        return (await versions.specs())["v1"].reason

    engine = Asking(reason)
    one = OwnVersion(empty_redis, KEYS, ModelConfig(name=MODEL), 1, "a")
    await one.begin()
    assert await reason() == f"{WHERE}has begun to load it"
    (info,) = version_infos(MODEL, *await versions.read(), [], {})
    # Long after: nobody is told to start another one.
    assert _progress(info, 100, MODEL) == f"v1 is loading: {WHERE}has begun to load it"
    await one.examine(loaded(engine))
    assert engine.seen[0] == f"{WHERE}has begun its health set (1 checks)"
    await one.ready()
    assert await reason() == ""


async def test_why_it_failed_replaces_how_far_it_was(empty_redis) -> None:
    versions = Versions(empty_redis, MODEL)
    await record(versions, b"b")
    one = OwnVersion(empty_redis, KEYS, ModelConfig(name=MODEL), 1, "a")
    await one.begin()
    with pytest.raises(HealthFailed, match="expected exactly 'b'"):
        await one.examine(loaded(EchoEngine()))
    spec = (await versions.specs())["v1"]
    assert (spec.state, spec.reason[:6]) == ("failed", "1 of 1")
