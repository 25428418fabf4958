"""Plans of a pool whose groups are of several versions."""

from support.policy_cases import BULK, NOW, group, job, order

from tokenmill.scheduler.parts import plan_parts
from tokenmill.scheduler.policy import plan
from tokenmill.scheduler.snapshot import Fairness, GroupView, Plan, Snapshot
from tokenmill.scheduler.targets import Targets, offers_of
from tokenmill.scheduler.waiting import CANDIDATES, Ready, WaitingRoom
from tokenmill.shared.messages import JobClass
from tokenmill.shared.routes import Route
from tokenmill.shared.shadow_keys import SHADOW_TENANT

HALVES = {"v1": 50.0, "v2": 50.0}
OLD = NOW - 60_000


def of(version: str, name: str, weights: str = "", **fields: object) -> GroupView:
    weights = weights or f"weights-{version}"
    offers = offers_of(version, weights)
    return group(name, version=version, weights=weights, offers=offers, **fields)


def parts(jobs, *groups, shares=HALVES, before=None, **fields) -> Plan:
    snapshot = Snapshot(jobs=tuple(jobs), groups=groups, **fields)
    return plan_parts(snapshot, shares, before or {}, NOW)[0]


def where(made: Plan) -> dict[str, str]:
    return {a.job_id: batch.group for batch in made.batches for a in batch.assignments}


def test_each_job_goes_to_a_group_that_it_needs() -> None:
    jobs = [
        job("pinned", needs="=v2", version="v2"),
        job("begun", needs="#weights-v1", weights="weights-v1", started=True),
        job("other", needs="=v1"),
    ]
    assert where(parts(jobs, of("v1", "a"), of("v2", "b"))) == {
        "pinned": "b",
        "begun": "a",
        "other": "a",
    }


def test_without_shares_a_free_job_takes_the_emptiest_and_a_bound_one_its_own() -> None:
    groups = (of("v1", "a", free_running=1), of("v2", "b"))
    jobs = [job("free"), job("bound", needs="=v1", version="v1")]
    assert where(parts(jobs, *groups, shares={})) == {"free": "b", "bound": "a"}


def test_copies_go_where_nothing_else_waits() -> None:
    """Whatever their class, turn and age would give them."""
    copy = {"tenant": SHADOW_TENANT, "job_class": BULK, "enqueued_ms": NOW - 300_000}
    copies = [job("copy1", needs="=v1", **copy), job("copy2", needs="=v2", **copy)]
    groups = (of("v1", "a", free_running=1, max_running=1), of("v2", "b"))
    users = [job("user", needs="=v1", job_class=BULK, enqueued_ms=NOW)]
    assert where(parts([*copies, *users], *groups)) == {"user": "a", "copy2": "b"}
    assert where(parts(copies, *groups)) == {"copy1": "a", "copy2": "b"}


def test_among_many_groups_a_bound_job_finds_its_own() -> None:
    """Also when more were in vain before than a plan asks all groups for."""
    many = [of("v1", f"a{number:03}") for number in range(100)]
    full = of("v2", "b", free_running=0)
    jobs = [job(f"x{n:03}", tokens=20 + n, needs="=v2") for n in range(90)]
    jobs.append(job("last", needs="#w3", enqueued_ms=NOW))
    made = parts(jobs, *many, full, of("v1", "z", "w3"), shares={})
    assert where(made) == {"last": "z"}


def test_what_waits_for_nobody_holds_up_nobody() -> None:
    """Old, large and many: neither the order nor a reservation is theirs."""
    lost = [
        job(f"lost{n}", tokens=500, needs="=v3", version="v3", enqueued_ms=OLD)
        for n in range(200)
    ]
    made = parts([*lost, job("next", needs="=v1")], of("v1", "a"), of("v2", "b"))
    assert order(made) == ["next"]
    assert made.impossible == ()
    free = parts([*lost, job("next")], of("v1", "a"), shares={})
    assert order(free) == ["next"]


def test_a_large_job_keeps_only_a_group_of_its_version_free() -> None:
    big = job("big", tokens=700, needs="=v1", enqueued_ms=OLD)
    busy = of("v1", "a", free_blocks=20, free_running=3)
    small = [job("s1", needs="=v1"), job("s2", needs="=v2")]
    made = parts([big, *small], busy, of("v2", "b"))
    assert where(made) == {"s2": "b"}


def test_suspects_of_one_version_leave_the_other_alone() -> None:
    suspects = [job(f"bad{n}", needs="=v2", alone=True) for n in range(3)]
    ordinary = [job("one", needs="=v1"), job("two", needs="=v2")]
    groups = (of("v1", "a"), of("v1", "c"), of("v2", "b"))
    snapshot = Snapshot(jobs=(*suspects, *ordinary), groups=groups)
    made, memory = plan_parts(snapshot, HALVES, {}, NOW)
    assert where(made)["one"] in "ac"
    assert where(made)["bad0"] == "b"
    # The only group of a version is shared in turns.
    again, _ = plan_parts(snapshot, HALVES, memory, NOW)
    assert where(again)["two"] == "b"


def test_bulk_of_one_version_gets_no_turn_on_account_of_another() -> None:
    memory = {"v1": Fairness(since_bulk=10**6, bulk_at_ms=NOW - 10**6)}
    bulk = job("bulk", needs="=v2", job_class=BULK, enqueued_ms=OLD)
    fresh = [job(f"i{n}", needs="=v1") for n in range(6)]
    groups = (of("v1", "a"), of("v2", "b", free_running=0))
    made = parts([bulk, *fresh], *groups, before=memory)
    assert order(made) == ["i0", "i1", "i2", "i3"]


def test_a_job_too_large_for_its_version_goes_to_another_with_a_share() -> None:
    big = job("big", tokens=900, needs="=v1")
    pinned = job("pinned", tokens=900, needs="=v1", version="v1")
    small, large = of("v1", "a"), of("v2", "b", total_blocks=500)
    made = parts([big, pinned], small, large)
    assert where(made) == {"big": "b"}
    assert made.impossible == ("pinned",)
    # One without a share takes nothing, and another tokenizer cannot read it.
    alone = parts([big], small, large, shares={"v1": 100.0})
    assert alone.impossible == ("big",)
    other = of("v2", "b", total_blocks=500, tokenizer="t2")
    mine = job("big", tokens=900, needs="=v1", tokenizer="t1")
    assert parts([mine], small, other).impossible == ("big",)


def test_no_group_gets_a_prompt_of_another_tokenizer() -> None:
    bad = job("bad", needs="=v1", tokenizer="t1")
    good = job("good", needs="=v1", tokenizer="t2")
    made = parts([bad, good], of("v1", "a", tokenizer="t2"))
    assert order(made) == ["good"]
    assert made.impossible == ()


def test_tenants_are_even_within_each_version() -> None:
    """What a tenant was given by a quick version does not count in a slow one."""
    before = {"v1": Fairness(clock=1e6, served={"t": 2e6})}
    jobs = [
        job("theirs", tenant="u", needs="=v2", enqueued_ms=NOW - 10),
        job("mine", tenant="t", needs="=v2", enqueued_ms=NOW - 20),
    ]
    groups = (of("v1", "a"), of("v2", "b", free_running=1))
    assert order(parts(jobs, *groups, before=before)) == ["mine"]


def test_one_version_plans_as_a_pool_without_versions() -> None:
    jobs = [job(f"j{n}", tokens=10 + n, tenant="ab"[n % 2]) for n in range(12)]
    groups = [group("a"), group("b", serves="short")]
    plain = plan(Snapshot(jobs=tuple(jobs), groups=tuple(groups)), NOW)
    assert parts(jobs, *groups, shares={}) == plain


def ready(name: str, stream: str = "q:interactive:128:1", **fields: object) -> Ready:
    return Ready(job(name, **fields), b"", stream, "1-1")


def test_a_plan_sees_what_stands_behind_jobs_that_nobody_may_run() -> None:
    room = WaitingRoom()
    room.aim_at(Targets(None, [("v1", "w1")]))
    for number in range(2 * CANDIDATES):
        room.add(ready(f"p{number}", version="v9"))
    room.add(ready("next"))
    assert [one.id for one in room.candidates()] == ["next"]
    # They take no place of the lane, and so what follows is read.
    assert room.count("q:interactive:128:1") == 1
    assert room.accepts(JobClass.INTERACTIVE)
    room.aim_at(Targets(None, [("v1", "w1"), ("v9", "w9")]))
    assert room.count("q:interactive:128:1") == 2 * CANDIDATES + 1
    assert room.candidates()[0].needs == "=v9"
    assert len(room) == 2 * CANDIDATES + 1


def test_a_lane_is_read_on_for_the_version_that_lacks_jobs() -> None:
    room = WaitingRoom()
    stream, kind = "q:interactive:128:1", JobClass.INTERACTIVE
    room.aim_at(Targets(Route(shares=HALVES), [("v1", "w1"), ("v2", "w2")]))
    slow = [n for n in range(4000) if room.targets.version_of(f"j{n}") == "v2"]
    for number in slow[:300]:
        room.add(ready(f"j{number}"))
    assert room.lacks(stream, kind, read_ahead=256)
    quick = [n for n in range(4000) if room.targets.version_of(f"j{n}") == "v1"]
    for number in quick[:40]:
        room.add(ready(f"j{number}"))
    assert not room.lacks(stream, kind, read_ahead=256)
    room.aim_at(Targets())
    assert not room.lacks(stream, kind, read_ahead=256)
    assert {one.job.needs for one in room} == {""}
