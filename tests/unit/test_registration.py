"""When a worker gives its signs of life."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.workers.jobs import JobTable
from tokenmill.workers.registration import Registration


def registered(table: JobTable, scripts: object = None) -> Registration:
    """A registration that sends nothing but what `scripts` takes."""
    nothing = cast("Any", None)
    return Registration(
        client=nothing,
        scripts=cast("Any", scripts),
        keys=nothing,
        spec=cast("Any", SimpleNamespace(group="w-1")),
        lease_ms=60_000,
        table=table,
        capacity=nothing,
        clock=nothing,
        outage=nothing,
        on_lost=nothing,
        on_cancelled=nothing,
    )


async def test_a_beat_follows_the_last_job_at_once() -> None:
    table = JobTable()
    table.empty.clear()
    waiting = asyncio.create_task(registered(table)._until_next(60.0))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done  # a job is in hand
    table.empty.set()
    await asyncio.wait_for(waiting, 30)


async def test_a_busy_worker_beats_at_its_interval() -> None:
    table = JobTable()
    table.empty.clear()
    await asyncio.wait_for(registered(table)._until_next(0.01), 30)
    assert not table.empty.is_set()  # it did not wait for the last job's end


class SlowRenewal:
    """As much of the scripts as a beat needs; a renewal takes until `go_on`."""

    def __init__(self) -> None:
        self.beats = 0
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def renew(self, *, jobs: list[tuple[str, int]], **_: object) -> list[str]:
        self.began.set()
        await self.go_on.wait()
        return ["ok"] * len(jobs)

    async def heartbeat(self, *_: object, **__: object) -> int:
        self.beats += 1
        return 1


class Jobs(list[Any]):
    """As much of a job table as a beat needs."""

    def holds(self, _: object) -> bool:
        return True


@pytest.mark.parametrize("silent", [False, True])
async def test_a_worker_that_falls_silent_ends_no_beat_that_was_under_way(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SimpleNamespace(id="j", epoch=1, closing=False)
    scripts = SlowRenewal()
    registration = registered(cast("Any", Jobs([job])), scripts)
    monkeypatch.setattr(registration, "_heartbeat", scripts.heartbeat)
    beat = asyncio.create_task(registration.beat())
    await scripts.began.wait()
    if silent:
        registration.fall_silent()
    scripts.go_on.set()
    await beat
    assert scripts.beats == (not silent)


async def test_a_heartbeat_under_way_is_waited_for_before_leases_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registration = registered(cast("Any", Jobs()), SlowRenewal())
    began, go_on = asyncio.Event(), asyncio.Event()

    async def heartbeat() -> None:
        began.set()
        await go_on.wait()

    monkeypatch.setattr(registration, "_heartbeat", heartbeat)
    beat = asyncio.create_task(registration.beat())
    await began.wait()
    registration.fall_silent()
    silent = asyncio.create_task(registration.wait_silent())
    done, _ = await asyncio.wait({silent}, timeout=0.05)
    assert not done
    go_on.set()
    await asyncio.gather(silent, beat)
