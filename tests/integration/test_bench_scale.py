"""bench/scale.py: its stopwatches sit on what a scheduler really runs."""

import pytest
from support.bench_modules import bench_module
from support.scheduled_pool import Pool, new_job, scheduling

from tokenmill.scheduler import dispatching
from tokenmill.scheduler.dispatching import Dispatcher
from tokenmill.scheduler.reading import LaneReader
from tokenmill.shared.versions import Versions

scale_scheduler = bench_module("scale_scheduler")
scale_routes = bench_module("scale_routes")
PARTS = ((dispatching, "plan_parts"), (Dispatcher, "step"), (LaneReader, "read"))


async def test_every_part_of_a_scheduler_is_timed(
    empty_redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in PARTS:  # puts them back at the end
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(scale_scheduler, "SPANS", {"plan": [], "step": [], "read": []})
    scale_scheduler.put_stopwatches()
    pool = Pool(empty_redis)
    async with scheduling(empty_redis):
        await pool.group()
        await pool.enqueue(new_job())
        await pool.work(1)
    assert [name for name, spans in scale_scheduler.SPANS.items() if not spans] == []


async def test_a_route_gives_all_jobs_to_the_version_that_serves(empty_redis) -> None:
    await scale_routes.add_route(empty_redis)
    route, specs = await Versions(empty_redis, scale_routes.MODEL).read()
    assert route.shares == {"v1": 100}
    assert {name: spec.state for name, spec in specs.items()} == {"v2": "added"}


def test_a_cost_is_a_figure_with_a_route_over_that_without() -> None:
    names = ("dispatched_per_s", "scheduler_us_per_job", "redis_us_per_job")
    more = ("plan_us_per_job", "step_p50_ms", "read_p50_ms")
    plain = dict.fromkeys((*names, *more), 100.0)
    found = scale_routes.cost(plain, plain | {"plan_us_per_job": 104.0})
    assert found == dict.fromkeys((*names, *more), 1.0) | {"plan_us_per_job": 1.04}
