"""Faults are tried again after a wait with full jitter; bad input never is."""

import random

import pytest

from tokenmill.shared.clock import RedisClock
from tokenmill.shared.config import SchedulerConfig
from tokenmill.shared.messages import JobError, JobRequest
from tokenmill.shared.scripts import Started
from tokenmill.workers.ending import Ending, Way
from tokenmill.workers.engine.request import EngineRequest
from tokenmill.workers.finish import Recorder
from tokenmill.workers.jobs import JobTable, RunningJob


class FakeScripts:
    """Notes what was asked for."""

    def __init__(self) -> None:
        self.failed: list[dict[str, object]] = []
        self.states: list[str] = []

    async def fail(self, **asked: object) -> str:
        self.failed.append(asked)
        return "retrying"

    async def finish(self, *, group: str, items: list) -> list[str]:
        self.states += [item.state for item in items]
        return ["recorded"] * len(items)


@pytest.fixture
def desk():
    scripts, table = FakeScripts(), JobTable()
    recorder = Recorder(
        scripts=scripts,
        group="g",
        model="m",
        weights_version="w",
        table=table,
        clock=RedisClock(),
        buckets=(128,),
        limits=SchedulerConfig(max_attempts=4),
        dead_ms=1234,
    )

    async def end(way: Way, attempts: int = 0) -> None:
        started = Started(status="started", job_id="j", epoch=1, attempts=attempts)
        request = EngineRequest(
            id="j@1", token_ids=(1,), sampling=JobRequest().sampling, seed=0
        )
        job = RunningJob(started, JobRequest(), request)
        table.add(job)
        await recorder.write([Ending(job, way, error=JobError("engine_error", "no"))])

    return scripts, end


@pytest.mark.parametrize(
    ("attempts", "longest"), [(0, 500), (1, 1000), (3, 4000), (9, 30_000), (99, 30_000)]
)
async def test_a_wait_is_drawn_from_the_whole_range(desk, attempts, longest) -> None:
    scripts, end = desk
    random.seed(0)  # one of 100,000 runs would draw no wait at an end of the range
    for _ in range(300):
        await end(Way.FAULT, attempts)
    waits = [asked["delay_ms"] for asked in scripts.failed]
    assert 1 <= min(waits) < longest / 20
    assert longest * 19 / 20 < max(waits) <= longest
    assert abs(sum(waits) / len(waits) - longest / 2) < longest / 6


async def test_the_settings_say_when_to_give_up_and_how_long_to_keep_it(desk) -> None:
    scripts, end = desk
    await end(Way.FAULT)
    (asked,) = scripts.failed
    assert (asked["max_attempts"], asked["dead_ms"]) == (4, 1234)


async def test_bad_input_is_recorded_and_never_tried_again(desk) -> None:
    scripts, end = desk
    await end(Way.FAILED)
    assert (scripts.failed, scripts.states) == ([], ["failed"])
