"""Suspects run alone; length classes keep to their groups. Rule by rule."""

from support.policy_cases import BULK, NOW, decide, group, job, order

from tokenmill.scheduler.rooms import SPILL_LOAD
from tokenmill.scheduler.snapshot import Fairness, Plan
from tokenmill.scheduler.turns import RESERVE_AFTER_MS

OLD = NOW - RESERVE_AFTER_MS


def places(made: Plan) -> dict[str, str]:
    return {a.job_id: b.group for b in made.batches for a in b.assignments}


def test_a_suspect_goes_alone_to_an_empty_group():
    jobs = [job("s", alone=True), job("a"), job("b")]
    made = decide(jobs, group("busy", free_running=3), group("empty"))
    assert places(made) == {"s": "empty", "a": "busy", "b": "busy"}
    (batch,) = [b for b in made.batches if b.group == "empty"]
    assert batch.assignments[0].alone


def test_nobody_joins_a_suspect():
    closed = group(alone="s", free_running=3)
    assert order(decide([job("a"), job("b", job_class=BULK)], closed)) == []
    assert decide([job("a")], closed).impossible == ()


def test_a_suspect_that_waited_gets_the_emptiest_group_kept_free():
    half, full = group("half", free_running=2), group("full", free_running=1)
    jobs = [job("s", alone=True, enqueued_ms=OLD), *(job(f"a{i}") for i in range(5))]
    made = decide(jobs, half, full)
    assert set(places(made).values()) == {"full"}
    fresh = [job("s", alone=True), *jobs[1:]]
    assert set(places(decide(fresh, half, full)).values()) == {"half", "full"}


def test_suspects_leave_half_of_the_groups_to_ordinary_work():
    suspects = [job(f"s{i}", alone=True, enqueued_ms=OLD) for i in range(9)]
    groups = [group(f"w{i}") for i in range(4)]
    made = decide([*suspects, job("a")], *groups)
    assert sum(name.startswith("s") for name in places(made)) == 2
    assert "a" in places(made)
    busy = [group(f"w{i}", alone="x") for i in range(2)]
    made = decide([*suspects, job("a")], *busy, group("w2"), group("w3"))
    assert list(places(made)) == ["a"]


def test_in_a_pool_of_one_suspects_and_others_take_turns():
    jobs = [job(f"s{i}", alone=True, enqueued_ms=OLD) for i in range(2)]
    jobs.append(job("a"))
    first = decide(jobs, group())
    assert order(first) == ["s0"]
    second = decide(jobs[1:], group(), fairness=first.fairness)
    assert order(second) == ["a"]
    third = decide([*jobs[1:2], job("b")], group(), fairness=second.fairness)
    assert order(third) == ["s1"]
    # Where nobody else waits there is no turn to give up.
    assert order(decide(jobs[1:2], group(), fairness=first.fairness)) == ["s1"]
    assert not Fairness().suspect_had_turn


def test_a_suspect_leaves_no_turn_to_jobs_that_no_group_can_run():
    jobs = [job("s", alone=True, enqueued_ms=OLD), job("newer", schema=9)]
    had = Fairness(suspect_had_turn=True)
    assert order(decide(jobs, group(), fairness=had)) == ["s"]


def test_suspects_go_by_class_then_deadline_then_age():
    suspects = [
        job("bulk", alone=True, job_class=BULK, enqueued_ms=NOW - 9000),
        job("old", alone=True, enqueued_ms=NOW - 900),
        job("due", alone=True, enqueued_ms=NOW, deadline_ms=NOW + 60_000),
    ]
    groups = [group(f"w{i}") for i in range(2)]
    assert order(decide(suspects, *groups)) == ["due"]
    assert order(decide(suspects[:2], *groups)) == ["old"]


def test_a_bulk_suspect_gets_its_turn_before_more_interactive_work():
    suspect = job("s", alone=True, job_class=BULK, enqueued_ms=OLD)
    jobs = [suspect, *(job(f"i{n}") for n in range(9))]
    half = group("half", free_running=2)
    assert "half" not in places(decide(jobs, half, group("w", free_running=1))).values()


SHORT, LONG = "128", "8192"


def short(name: str, **fields: object):
    return job(name, 10, bucket=SHORT, **fields)


def long(name: str, tokens: int = 3000, **fields: object):
    return job(name, tokens, bucket=LONG, **fields)


def sized(name: str, serves: str = "any", **fields: object):
    return group(name, total_blocks=1000, batch_tokens=4096, serves=serves, **fields)


def test_each_length_goes_to_the_groups_that_serve_it():
    jobs = [short("s1"), long("l1"), short("s2")]
    made = decide(jobs, sized("long", "long"), sized("short", "short"))
    assert places(made) == {"s1": "short", "s2": "short", "l1": "long"}


def test_a_bound_group_is_preferred_to_an_unbound_one():
    made = decide([short("s")], sized("any"), sized("short", "short", free_running=1))
    assert places(made) == {"s": "short"}


def test_jobs_spill_over_to_an_idle_group_of_the_other_length_only():
    full = sized("short", "short", free_running=0)
    made = decide([short("s")], full, sized("long", "long"))
    assert places(made) == {"s": "long"}
    busy = sized("long", "long", free_running=2)
    assert busy.free_running / busy.max_running < 1 - SPILL_LOAD
    assert places(decide([short("s")], full, busy)) == {}


def test_they_do_not_spill_where_jobs_of_its_own_wait():
    full = sized("short", "short", free_running=0)
    jobs = [short("s"), long("l1"), long("l2")]
    made = decide(jobs, full, sized("long", "long"))
    assert places(made) == {"l1": "long"}  # its prefill budget is spent: l2 waits


def test_a_binding_makes_no_job_impossible():
    only_short = sized("short", "short", free_running=2)
    assert places(decide([long("l", 900)], only_short)) == {"l": "short"}
    small_long = group("long", total_blocks=10, serves="long")
    made = decide([long("l", 900)], only_short, small_long)
    assert places(made) == {"l": "short"}


def test_a_suspect_alone_in_the_only_group_of_a_length_does_not_stop_it():
    closed = sized("short", "short", alone="x", free_running=3)
    made = decide([short("s")], closed, sized("long", "long", free_running=2))
    assert places(made) == {"s": "long"}


def test_the_bound_between_short_and_long_is_a_setting():
    middle = job("m", 500, bucket="512")
    groups = (sized("long", "long"), sized("short", "short"))
    assert places(decide([middle], *groups)) == {"m": "short"}
    assert places(decide([middle], *groups, short_tokens=128)) == {"m": "long"}
