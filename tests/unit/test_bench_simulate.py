"""The simulated groups and queue of the benchmarks: they account for every job."""

from support.bench_modules import bench_module

from tokenmill.scheduler.policy import plan
from tokenmill.scheduler.snapshot import Assignment, WaitingJob
from tokenmill.shared.messages import JobClass

group_module = bench_module("simulate_group")
load = bench_module("simulate_load")
pool = bench_module("simulate_pool")
fifo = bench_module("simulate_fifo").fifo
FIT = (10.0, 1.0)


def simulated(policy: object, queue: object, jobs: int = 150):
    groups = [group_module.Group(f"w{i}", FIT, max_running=4) for i in range(3)]
    side = pool.Simulation(policy, queue, groups, {})
    return side.run(load.mixed(jobs, 0.02, seed=3)), groups


def test_every_job_ends_once_with_all_its_tokens_and_all_credit_is_back():
    for policy, queue in ((plan, pool.Lanes()), (fifo, pool.OneLine())):
        outcome, groups = simulated(policy, queue)
        assert len({run.job.id for run in outcome.ended}) == 150
        asked = {job.id: output for _, job, output in load.mixed(150, 0.02, seed=3)}
        assert {run.job.id: run.made for run in outcome.ended} == asked
        for group in groups:
            assert group.free == [group.total_blocks, 4, group.batch_tokens]
            assert group.bulk == [0, 0, 0]
            assert group.work == 0


def test_the_same_seed_gives_the_same_run():
    first, _ = simulated(plan, pool.Lanes())
    again, _ = simulated(plan, pool.Lanes())
    ends = [(run.job.id, run.finished_ms) for run in first.ended]
    assert ends == [(run.job.id, run.finished_ms) for run in again.ended]


def job(name: str, job_class: JobClass) -> WaitingJob:
    return WaitingJob(
        id=name,
        tokens=100,
        max_tokens=10,
        job_class=job_class,
        bucket="128",
        tenant="t",
        enqueued_ms=0,
    )


def test_a_step_takes_what_the_fit_says_and_bulk_gives_way_after_it():
    group = group_module.Group("w", FIT, max_running=1)
    bulk = group.take(job("b", JobClass.BULK), Assignment("b", 100, 14), 3, 0.0)
    assert group.next_ms == 10 + 100  # the prompt in one step
    group.step()
    urgent = group.take(
        job("i", JobClass.INTERACTIVE), Assignment("i", 100, 14), 2, 112
    )
    assert group.next_ms == 110 + 11  # one token of the bulk job, then it yields
    ended = []
    while group.next_ms < group_module.NEVER:
        ended += group.step()
    assert [run.job.id for run in ended] == ["i", "b"]
    assert urgent.first_ms == 121 + 110
    assert (bulk.made, group.preemptions) == (3, 1)
