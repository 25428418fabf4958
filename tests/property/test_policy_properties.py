"""What holds of every plan, whatever waits and whoever has room."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.scheduler.policy import BULK_PATIENCE_MS, plan
from tokenmill.scheduler.snapshot import Fairness, GroupView, Snapshot, WaitingJob
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
    )


@st.composite
def groups(draw: st.DrawFn, index: int) -> GroupView:
    total, running = draw(st.integers(1, 2000)), draw(st.integers(1, 16))
    budget = draw(st.integers(16, 4096))
    return GroupView(
        group=f"w-{index}",
        total_blocks=total,
        max_running=running,
        batch_tokens=budget,
        block_size=8,
        max_context=draw(st.sampled_from([512, 8192])),
        free_blocks=draw(st.integers(0, total)),
        free_running=draw(st.integers(0, running)),
        free_tokens=draw(st.just(budget) | st.integers(-100, budget)),
        step_ms=draw(st.sampled_from([0.0, 30.0, 900.0])),
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
        ),
        arrivals_per_s=draw(st.sampled_from([0.0, 1000.0])),
    )


@given(snapshots())
@settings(deadline=None)
def test_no_budget_is_exceeded_and_no_job_goes_twice(snapshot: Snapshot):
    made = plan(snapshot, NOW)
    by_id = {job.id: job for job in snapshot.jobs}
    given_out = [a.job_id for b in made.batches for a in b.assignments]
    assert len(given_out) == len(set(given_out))
    assert not set(given_out) & set(made.impossible)
    for group in snapshot.groups:
        mine = [
            a for b in made.batches if b.group == group.group for a in b.assignments
        ]
        tokens = sum(a.tokens * a.choices for a in mine)
        choices = sum(a.choices for a in mine)
        if choices > group.free_running and mine:
            assert len(mine) == 1
            assert choices > group.max_running
            assert group.free_running >= group.max_running
        assert sum(a.cost_blocks for a in mine) <= group.free_blocks
        if tokens > group.free_tokens and mine:
            assert len(mine) == 1
            assert tokens > group.batch_tokens
            assert group.free_tokens >= group.batch_tokens
        for a in mine:
            job = by_id[a.job_id]
            longest = min(job.tokens + job.max_tokens, group.max_context)
            assert a.tokens == job.tokens < group.max_context
            assert a.choices == job.choices
            assert a.cost_blocks * group.block_size >= job.choices * longest


@given(snapshots())
@settings(deadline=None)
def test_a_batch_has_one_class_and_one_bucket(snapshot: Snapshot):
    by_id = {job.id: job for job in snapshot.jobs}
    for batch in plan(snapshot, NOW).batches:
        assert batch.assignments
        for assignment in batch.assignments:
            job = by_id[assignment.job_id]
            assert (job.job_class, job.bucket) == (batch.job_class, batch.bucket)
            assert job.deadline_ms is None or job.deadline_ms > NOW


@given(snapshots(), st.randoms())
@settings(deadline=None)
def test_the_same_snapshot_gives_the_same_plan_in_any_order(snapshot: Snapshot, random):
    first = plan(snapshot, NOW)
    assert plan(snapshot, NOW) == first
    shuffled = list(snapshot.jobs)
    random.shuffle(shuffled)
    again = Snapshot(
        jobs=tuple(shuffled),
        groups=snapshot.groups[::-1],
        fairness=snapshot.fairness,
        arrivals_per_s=snapshot.arrivals_per_s,
    )
    other = plan(again, NOW)
    assert {b.group: b for b in first.batches}.keys() == {
        b.group: b for b in other.batches
    }.keys()
    assert sorted(a.job_id for b in first.batches for a in b.assignments) == sorted(
        a.job_id for b in other.batches for a in b.assignments
    )


@given(snapshots())
@settings(deadline=None)
def test_interactive_never_waits_behind_bulk(snapshot: Snapshot):
    """Bulk got room only where no interactive job left behind could have used it."""
    made = plan(snapshot, NOW)
    given_out = {a.job_id for b in made.batches for a in b.assignments}
    bulk = [b for b in made.batches if b.job_class is JobClass.BULK]
    turn = any(
        job.job_class is JobClass.BULK and NOW - job.enqueued_ms >= BULK_PATIENCE_MS
        for job in snapshot.jobs
    )
    if turn and snapshot.fairness.since_bulk:
        assert sum(len(b.assignments) for b in bulk) <= len(snapshot.jobs)
        return  # an impatient bulk job may have had its turn
    views = {group.group: group for group in snapshot.groups}
    left = [
        job
        for job in snapshot.jobs
        if job.job_class is JobClass.INTERACTIVE
        and job.id not in given_out
        and not (job.deadline_ms is not None and job.deadline_ms <= NOW)
    ]
    for batch in bulk:
        assert not any(views[batch.group].could_hold(job) for job in left)


@given(snapshots())
@settings(deadline=None)
def test_it_never_waits_longer_than_the_window(snapshot: Snapshot):
    made = plan(snapshot, NOW)
    assert made.wake_in_ms is None or 1 <= made.wake_in_ms <= snapshot.max_wait_ms
    if any(group.idle for group in snapshot.groups):
        assert made.wake_in_ms is None


@given(
    st.sampled_from(JobClass),
    st.integers(-2, 2),
    st.integers(1, 900),
    st.sampled_from([1, 100, 2000]),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_nothing_starves_in_a_flood(
    victim_class: JobClass,
    victim_priority: int,
    victim_tokens: int,
    flood_tokens: int,
    own_tenant: bool,
):
    """One job against endless, more urgent arrivals that fill every slot."""
    victim = WaitingJob(
        id="victim",
        tokens=victim_tokens,
        max_tokens=10,
        job_class=victim_class,
        bucket=bucket_of(victim_tokens, BOUNDS),
        priority=victim_priority,
        tenant="flood" if own_tenant else "small",
        enqueued_ms=NOW,
    )
    waiting = {victim.id: victim}
    fairness, now, free = Fairness(), NOW, 300
    releases: list[tuple[int, int]] = []
    for tick in range(2_000):
        now += 200
        for i in range(3):
            job = WaitingJob(
                id=f"f{tick:04}-{i}",
                tokens=flood_tokens,
                max_tokens=10,
                bucket=bucket_of(flood_tokens, BOUNDS),
                priority=-2,
                tenant="flood",
                enqueued_ms=now,
                deadline_ms=now + 4_000,
            )
            waiting[job.id] = job
        free += sum(blocks for at, blocks in releases if at <= now)
        releases = [(at, blocks) for at, blocks in releases if at > now]
        group = GroupView(
            group="w",
            total_blocks=300,
            max_running=4,
            batch_tokens=2048,
            block_size=8,
            max_context=8192,
            free_blocks=free,
            free_running=4 - len(releases),
            free_tokens=2048,
        )
        waiting = {k: j for k, j in waiting.items() if (j.deadline_ms or now + 1) > now}
        made = plan(
            Snapshot(jobs=tuple(waiting.values()), groups=(group,), fairness=fairness),
            now,
        )
        fairness = made.fairness
        for assignment in (a for b in made.batches for a in b.assignments):
            del waiting[assignment.job_id]
            free -= assignment.cost_blocks
            releases.append((now + 700, assignment.cost_blocks))
        if "victim" not in waiting:
            return
    raise AssertionError(f"not served within {(now - NOW) / 1000:.0f} s")
