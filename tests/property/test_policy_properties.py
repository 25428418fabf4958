"""What holds of every plan, whatever waits and whoever has room."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tokenmill.scheduler.policy import plan
from tokenmill.scheduler.snapshot import (
    Fairness,
    GroupView,
    Plan,
    Snapshot,
    WaitingJob,
)
from tokenmill.scheduler.turns import BULK_PATIENCE_MS
from tokenmill.shared.keys import bucket_of
from tokenmill.shared.messages import JobClass

NOW = 10_000_000
BOUNDS = (128, 512, 2048, 8192)


@st.composite
def jobs(draw: st.DrawFn, index: int) -> WaitingJob:
    tokens = draw(st.one_of(st.integers(1, 200), st.integers(1, 9000)))
    return WaitingJob(
        id=f"j{index:03}",
        tokens=tokens,
        max_tokens=draw(st.integers(1, 600)),
        choices=draw(st.sampled_from([1, 1, 1, 4])),
        job_class=draw(st.sampled_from(JobClass)),
        bucket=bucket_of(tokens, BOUNDS),
        priority=draw(st.integers(-2, 2)),
        tenant=draw(st.sampled_from("abc")),
        enqueued_ms=NOW - draw(st.integers(0, 90_000)),
        deadline_ms=draw(st.none() | st.integers(NOW - 50, NOW + 20_000)),
        alone=draw(st.sampled_from([False] * 7 + [True])),
        schema=draw(st.sampled_from([1, 1, 1, 2])),
    )


@st.composite
def groups(draw: st.DrawFn, index: int) -> GroupView:
    total, running = draw(st.integers(1, 2000)), draw(st.integers(1, 16))
    budget = draw(st.integers(16, 4096))
    # What interactive jobs and bulk hold; together it may be more than there is.
    busy_blocks, busy_running = (
        draw(st.integers(0, total)),
        draw(st.integers(0, running)),
    )
    busy_tokens = draw(st.just(0) | st.integers(0, budget + 100))
    bulk = draw(st.booleans()) and busy_running < running
    bulk_running = draw(st.integers(1, running)) if bulk else 0
    bulk_blocks = draw(st.integers(1, total)) if bulk else 0
    bulk_tokens = draw(st.integers(0, budget)) if bulk else 0
    return GroupView(
        group=f"w-{index}",
        total_blocks=total,
        max_running=running,
        batch_tokens=budget,
        block_size=8,
        max_context=draw(st.sampled_from([512, 8192])),
        free_blocks=total - busy_blocks - bulk_blocks,
        free_running=running - busy_running - bulk_running,
        free_tokens=budget - busy_tokens - bulk_tokens,
        bulk_blocks=bulk_blocks,
        bulk_running=bulk_running,
        bulk_tokens=bulk_tokens,
        step_ms=draw(st.sampled_from([0.0, 30.0, 900.0])),
        alone=draw(st.sampled_from([""] * 5 + ["x"])) if busy_running else "",
        serves=draw(st.sampled_from(["any", "any", "short", "long"])),
        schema=draw(st.sampled_from([1, 2])),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    return Snapshot(
        jobs=tuple(draw(jobs(i)) for i in range(draw(st.integers(0, 25)))),
        groups=tuple(draw(groups(i)) for i in range(draw(st.integers(0, 3)))),
        fairness=Fairness(
            clock=draw(st.sampled_from([0.0, 500.0])),
            served=draw(st.dictionaries(st.sampled_from("abc"), st.floats(0, 2000))),
            since_bulk=draw(st.sampled_from([0, 10**6])),
            pushed_ms=draw(
                st.dictionaries(
                    st.sampled_from(["w-0", "w-1"]), st.just(NOW - BULK_PATIENCE_MS)
                )
            ),
            restored_ms=draw(
                st.dictionaries(st.sampled_from(["w-0", "w-1"]), st.just(NOW))
            ),
            suspect_had_turn=draw(st.booleans()),
        ),
        weights=draw(st.sampled_from([{}, {"a": 3.0}])),
        arrivals_per_s=draw(st.sampled_from([0.0, 1000.0])),
    )


def fits(need: int, left: int, whole: int) -> bool:
    """What is larger than the whole goes when all of the whole is left."""
    return need <= left or need > whole <= left


@given(snapshots())
@settings(deadline=None, max_examples=60)
def test_no_budget_is_exceeded_and_no_job_goes_twice(snapshot: Snapshot):
    """Booked one after another as Redis does it, no job of a plan is refused."""
    made = plan(snapshot, NOW)
    by_id = {job.id: job for job in snapshot.jobs}
    given_out = [a.job_id for b in made.batches for a in b.assignments]
    assert len(given_out) == len(set(given_out))
    assert not set(given_out) & set(made.impossible)
    for group in snapshot.groups:
        blocks, running = group.free_blocks, group.free_running
        tokens, closed = group.free_tokens, bool(group.alone)
        over = [group.bulk_blocks, group.bulk_running, group.bulk_tokens]
        mine = [b for b in made.batches if b.group == group.group]
        for batch, a in ((b, a) for b in mine for a in b.assignments):
            job = by_id[a.job_id]
            longest = min(job.tokens + job.max_tokens, group.max_context)
            assert a.tokens == job.tokens < group.max_context
            assert (a.choices, a.alone) == (job.choices, job.alone)
            assert a.cost_blocks * group.block_size >= job.choices * longest
            assert job.schema <= group.schema
            assert not closed
            prefill = a.tokens * a.choices
            bulk = batch.job_class is JobClass.BULK
            lent = [0, 0, 0] if bulk or a.alone else over
            if a.alone:
                assert running >= group.max_running
                assert a.cost_blocks <= blocks
            else:
                assert running + lent[1] >= 1
                assert a.cost_blocks <= blocks + lent[0]
                assert fits(a.choices, running + lent[1], group.max_running)
                assert fits(prefill, tokens + lent[2], group.batch_tokens)
            blocks, running = blocks - a.cost_blocks, running - a.choices
            tokens, closed = tokens - prefill, a.alone
            if bulk:
                taken = (a.cost_blocks, a.choices, prefill)
                over = [x + y for x, y in zip(over, taken, strict=True)]


@given(snapshots())
@settings(deadline=None, max_examples=60)
def test_a_batch_has_one_class_and_one_bucket(snapshot: Snapshot):
    by_id = {job.id: job for job in snapshot.jobs}
    for batch in plan(snapshot, NOW).batches:
        assert batch.assignments
        for assignment in batch.assignments:
            job = by_id[assignment.job_id]
            assert (job.job_class, job.bucket) == (batch.job_class, batch.bucket)
            assert job.deadline_ms is None or job.deadline_ms > NOW


@given(snapshots(), st.randoms())
@settings(deadline=None, max_examples=60)
def test_the_same_snapshot_gives_the_same_plan_in_any_order(snapshot: Snapshot, random):
    first = plan(snapshot, NOW)
    assert plan(snapshot, NOW) == first
    shuffled = list(snapshot.jobs)
    random.shuffle(shuffled)
    again = Snapshot(
        jobs=tuple(shuffled),
        groups=snapshot.groups[::-1],
        fairness=snapshot.fairness,
        weights=snapshot.weights,
        arrivals_per_s=snapshot.arrivals_per_s,
    )
    other = plan(again, NOW)
    assert {b.group: b for b in first.batches}.keys() == {
        b.group: b for b in other.batches
    }.keys()
    assert sorted(a.job_id for b in first.batches for a in b.assignments) == sorted(
        a.job_id for b in other.batches for a in b.assignments
    )


def interactive(made: Plan) -> list[tuple[str, str]]:
    return sorted(
        (b.group, a.job_id)
        for b in made.batches
        if b.job_class is JobClass.INTERACTIVE
        for a in b.assignments
    )


@given(snapshots())
@settings(deadline=None, max_examples=60)
def test_what_interactive_jobs_get_does_not_depend_on_waiting_bulk(snapshot: Snapshot):
    fairness = replace(snapshot.fairness, since_bulk=0, bulk_at_ms=NOW)  # no turn
    snapshot = replace(snapshot, fairness=fairness)
    ordinary = tuple(
        job
        for job in snapshot.jobs
        if job.job_class is JobClass.INTERACTIVE or not job.alone
    )
    alone = tuple(job for job in ordinary if job.job_class is JobClass.INTERACTIVE)
    with_bulk = interactive(plan(replace(snapshot, jobs=ordinary), NOW))
    if fairness.suspect_had_turn and not all(job.alone for job in alone):
        return  # in a pool of one, bulk is ordinary work too
    if any(job.alone for job in alone) and len(snapshot.groups) == 1:
        return
    assert with_bulk == interactive(plan(replace(snapshot, jobs=alone), NOW))


@given(groups(0), st.lists(st.integers(1, 500), max_size=20))
@settings(deadline=None, max_examples=60)
def test_interactive_jobs_find_as_much_room_with_bulk_as_without(
    view: GroupView, sizes: list[int]
):
    waiting = tuple(
        WaitingJob(
            id=f"j{i:03}",
            tokens=tokens,
            max_tokens=20,
            bucket=bucket_of(tokens, BOUNDS),
            tenant="a",
            enqueued_ms=NOW,
        )
        for i, tokens in enumerate(sizes)
    )
    without = replace(
        view,
        free_blocks=view.free_blocks + view.bulk_blocks,
        free_running=view.free_running + view.bulk_running,
        free_tokens=view.free_tokens + view.bulk_tokens,
        bulk_blocks=0,
        bulk_running=0,
        bulk_tokens=0,
    )
    found = plan(Snapshot(jobs=waiting, groups=(view,)), NOW)
    assert interactive(found) == interactive(
        plan(Snapshot(jobs=waiting, groups=(without,)), NOW)
    )


@given(snapshots())
@settings(deadline=None, max_examples=60)
def test_it_never_waits_longer_than_the_window(snapshot: Snapshot):
    made = plan(snapshot, NOW)
    assert made.wake_in_ms is None or 1 <= made.wake_in_ms <= snapshot.max_wait_ms
    if any(group.idle for group in snapshot.groups):
        assert made.wake_in_ms is None
