"""Random routes, groups and jobs: who may not have a job never gets it."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy_cases import NOW, group, job

from tokenmill.scheduler.parts import plan_parts
from tokenmill.scheduler.snapshot import GroupView, Snapshot, WaitingJob
from tokenmill.scheduler.targets import Targets, offers_of
from tokenmill.shared.messages import JobClass
from tokenmill.shared.routes import Route

VERSIONS = ("v1", "v2", "v3")
WEIGHTS = ("w1", "w2", "w1+tp2")
SHARES = ({}, {"v1": 100.0}, {"v1": 50.0, "v2": 50.0}, {"v2": 1.0, "v3": 99.0})


@st.composite
def groups(draw: st.DrawFn, index: int) -> GroupView:
    version, weights = draw(st.sampled_from(VERSIONS)), draw(st.sampled_from(WEIGHTS))
    total, slots = draw(st.integers(4, 200)), draw(st.integers(1, 4))
    return group(
        f"g{index}",
        version=version,
        weights=weights,
        offers=offers_of(version, weights),
        tokenizer=draw(st.sampled_from(["", "t1", "t2"])),
        total_blocks=total,
        free_blocks=draw(st.integers(0, total)),
        max_running=slots,
        free_running=draw(st.integers(0, slots)),
        schema=draw(st.sampled_from([2, 3])),
        serves=draw(st.sampled_from(["any", "any", "short", "long"])),
    )


@st.composite
def jobs(draw: st.DrawFn, index: int) -> WaitingJob:
    weights = draw(st.sampled_from(["", "", *WEIGHTS, "w9"]))
    version = draw(st.sampled_from(["", "", "", *VERSIONS, "v9"]))
    return job(
        f"j{index:02}",
        tokens=draw(st.integers(1, 300)),
        max_tokens=draw(st.integers(1, 60)),
        version=version,
        weights=weights,
        started=bool(weights),
        schema=3 if version else 1,
        tokenizer="" if weights else draw(st.sampled_from(["", "t1"])),
        tenant=draw(st.sampled_from("ab")),
        job_class=draw(st.sampled_from(JobClass)),
        enqueued_ms=NOW - draw(st.integers(0, 60_000)),
        alone=draw(st.sampled_from([False] * 9 + [True])),
    )


def may_run(one: WaitingJob, where: GroupView, targets: Targets, route: Route) -> bool:
    """The rule in words of its own: pin, else weights, else the route."""
    if one.version and where.version != one.version:
        return False
    if one.weights and one.weights not in targets.gone:
        return where.weights == one.weights
    if one.version or not route.shares:
        return True
    return route.shares.get(where.version, 0) > 0


@given(st.data(), st.sampled_from(SHARES))
@settings(deadline=None, max_examples=150)
def test_eligibility_holds_and_no_room_is_left_unused(data, shares) -> None:
    route = Route(shares=shares)
    live = tuple(data.draw(groups(i)) for i in range(data.draw(st.integers(0, 5))))
    lines = [(view.version, view.weights) for view in live]
    gone = data.draw(st.sampled_from([(), ("w9",)]))
    targets = Targets(route, lines, gone)
    waiting = []
    for index in range(data.draw(st.integers(0, 14))):
        one = data.draw(jobs(index))
        needs = targets.needs(one.id, one.version, one.weights)
        waiting.append(WaitingJob(**{**fields(one), "needs": needs}))
    snapshot = Snapshot(jobs=tuple(waiting), groups=live)
    made, _ = plan_parts(snapshot, shares, {}, NOW)
    by_id, by_name = {one.id: one for one in waiting}, {v.group: v for v in live}
    given_to = {a.job_id: by_name[b.group] for b in made.batches for a in b.assignments}
    for job_id, where in given_to.items():
        one = by_id[job_id]
        assert may_run(one, where, targets, route), (one, where)
        assert one.schema <= where.schema
    for job_id in made.impossible:
        one = by_id[job_id]
        assert job_id not in given_to
        ways = [v for v in live if v.admits(one) and v.schema >= one.schema]
        assert ways
        assert not any(v.could_hold(one) for v in ways)
    starved(waiting, live, set(given_to), made.impossible)


def fields(one: WaitingJob) -> dict[str, object]:
    return {name: getattr(one, name) for name in WaitingJob.__struct_fields__}


def starved(waiting, live, given_ids, impossible) -> None:
    """A group that is left empty is one that no waiting job may and could use."""
    if any(one.alone for one in waiting):
        return  # a group may be kept free for a suspect
    taken = {one.group for one in live if one.free_running < one.max_running}
    idle = [v for v in live if v.group not in taken and v.free_blocks == v.total_blocks]
    for one in waiting:
        if one.id in given_ids or one.id in impossible:
            continue
        for view in idle:
            if view.could_hold(one) and view.serves == "any":
                # Whoever left it waiting gave the room to others of the same group.
                assert given_ids, (one, view)


def test_a_job_of_each_version_runs_while_floods_of_the_others_wait() -> None:
    shares = {"v1": 50.0, "v2": 50.0}
    views = [
        group(n, version=v, weights=v, offers=offers_of(v, v), free_running=free)
        for n, v, free in (("a", "v1", 0), ("b", "v2", 1))
    ]
    flood = [
        job(f"f{n:03}", needs="=v1", tenant="a", enqueued_ms=NOW - 90_000, priority=-9)
        for n in range(600)
    ]
    one = job("one", needs="=v2", tenant="b")
    snapshot = Snapshot(jobs=(*flood, one), groups=tuple(views))
    made, _ = plan_parts(snapshot, shares, {}, NOW)
    assert [a.job_id for b in made.batches for a in b.assignments] == ["one"]
