"""The worker's process: what a signal does before it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.shared.config import Config, ModelConfig
from tokenmill.workers import service
from tokenmill.workers.service import WorkOptions, serve


class Announcing:
    """A worker that is told to end at the moment it becomes visible."""

    def __init__(self) -> None:
        self.drained = asyncio.Event()

    def drain(self) -> None:
        self.drained.set()

    async def announce(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(self.drained.wait(), 60)

    async def run(self) -> int:
        assert self.drained.is_set()
        return 0


async def test_a_signal_while_it_registers_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Announcing] = []
    loaded = SimpleNamespace(
        card=SimpleNamespace(model="m", weights_version="v", max_context=1),
        load_s=0.0,
        device="cpu",
        kernels="none",
        group=None,
        adapters=None,
        tp=1,
    )

    async def nothing(*_: object, **__: object) -> object:
        return loaded

    def worker(*_: object) -> Announcing:
        made.append(Announcing())
        return made[-1]

    def ended(code: int) -> None:
        raise AssertionError(f"ended at once with {code}, its group still visible")

    class Version:
        """Of a model that has one."""

        def __init__(self, *_: object) -> None:
            self.begin = self.loaded = self.examine = self.ready = nothing

        @asynccontextmanager
        async def watched(self, _: object) -> AsyncIterator[None]:
            yield

    client = SimpleNamespace(aclose=nothing)
    herald = SimpleNamespace(announce=nothing, close=lambda: None)
    monkeypatch.setattr(service, "connect", lambda *_, **__: client)
    monkeypatch.setattr(service, "Herald", lambda *_: herald)
    monkeypatch.setattr(service, "OwnVersion", Version)
    monkeypatch.setattr(service, "settle", lambda: None)
    monkeypatch.setattr(service, "_in_thread", nothing)
    monkeypatch.setattr(service, "_reach", nothing)
    monkeypatch.setattr(service, "_worker", worker)
    monkeypatch.setattr(os, "_exit", ended)
    options = WorkOptions(url="redis://nowhere", model=ModelConfig(name="m"))
    ready = cast("Any", lambda *_: None)
    try:
        assert await serve(options, Config(), ready, ready) == 0
    finally:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    assert made[0].drained.is_set()
