"""The scheduling policy, rule by rule."""

import pytest
from support.policy_cases import BULK, NOW, decide, group, job, order

from tokenmill.scheduler.packing import PREFILL_PATIENCE_MS
from tokenmill.scheduler.snapshot import Fairness, GroupView
from tokenmill.scheduler.turns import BULK_PATIENCE_MS, RESERVE_AFTER_MS
from tokenmill.shared.messages import JobClass


def test_an_idle_group_answers_at_once():
    made = decide([job("a")], group(step_ms=900.0), arrivals_per_s=1000.0)
    assert order(made) == ["a"]
    assert made.wake_in_ms is None


def test_a_busy_group_waits_half_a_step_for_a_fuller_batch():
    busy = group(free_running=3, step_ms=100.0)
    made = decide([job("a", enqueued_ms=NOW - 10)], busy, arrivals_per_s=500.0)
    assert (order(made), made.wake_in_ms) == ([], 40)


@pytest.mark.parametrize(
    ("waited_ms", "rate"), [(50, 500.0), (10, 0.0), (10, 1.0)], ids=str
)
def test_it_does_not_wait_past_the_window_or_for_nobody(waited_ms: int, rate: float):
    busy = group(free_running=3, step_ms=100.0)
    jobs = [job("a", enqueued_ms=NOW - waited_ms)]
    assert order(decide(jobs, busy, arrivals_per_s=rate)) == ["a"]


def test_the_window_never_exceeds_its_maximum():
    busy = group(free_running=3, step_ms=60_000.0)
    made = decide([job("a")], busy, arrivals_per_s=500.0)
    assert made.wake_in_ms == 200


def test_a_batch_that_cannot_grow_does_not_wait():
    busy = group(free_running=1, step_ms=100.0)
    jobs = [job("a"), job("b")]
    assert len(order(decide(jobs, busy, arrivals_per_s=500.0))) == 1


def test_interactive_goes_first_and_bulk_fills_the_rest():
    jobs = [job("b1", job_class=BULK), job("i1"), job("b2", job_class=BULK)]
    assert order(decide(jobs, group(max_running=2))) == ["i1", "b1"]


def test_bulk_fills_what_an_interactive_job_cannot_use_yet():
    jobs = [job("big", 700, bucket="2048"), job("small", job_class=BULK)]
    assert order(decide(jobs, group(free_blocks=20))) == ["small"]


def held(by_bulk: int, **fields: object) -> GroupView:
    """A group of 4 slots whose bulk holds so many, with a quarter of it each."""
    return group(
        free_blocks=100 - 25 * by_bulk,
        free_running=4 - by_bulk,
        free_tokens=1000 - 250 * by_bulk,
        bulk_blocks=25 * by_bulk,
        bulk_running=by_bulk,
        bulk_tokens=250 * by_bulk,
        **fields,
    )


def test_an_interactive_job_takes_what_bulk_holds():
    jobs = [job(f"i{n}") for n in range(5)]
    assert len(order(decide(jobs, held(4)))) == 4
    assert order(decide([job("b", job_class=BULK)], held(4))) == []


def test_a_bulk_prompt_in_prefill_does_not_block_an_interactive_one():
    busy = group(free_tokens=-3096, bulk_tokens=4096, free_running=3, bulk_running=1)
    assert order(decide([job("i", 1000, bucket="2048")], busy)) == []
    roomy = group(
        "w",
        total_blocks=1000,
        free_tokens=-3096,
        bulk_tokens=4096,
        free_running=3,
        bulk_running=1,
    )
    assert order(decide([job("i", 1000, bucket="2048")], roomy)) == ["i"]


def test_a_group_with_room_comes_before_pushing_bulk_out():
    made = decide([job("i")], held(4), group("free", free_running=1, free_tokens=100))
    assert [batch.group for batch in made.batches] == ["free"]


def test_no_more_bulk_goes_where_bulk_is_pushed_out():
    pushed = group(free_running=-1, bulk_running=3, free_blocks=50)
    assert order(decide([job("b", job_class=BULK)], pushed)) == []


def test_interactive_does_not_wait_for_a_fuller_batch_behind_bulk():
    made = decide([job("i")], held(2, step_ms=100.0), arrivals_per_s=500.0)
    assert (order(made), made.wake_in_ms) == (["i"], None)


def test_impatient_bulk_gets_a_turn():
    old = job("old", job_class=BULK, enqueued_ms=NOW - BULK_PATIENCE_MS)
    jobs = [job("i"), old]
    full = group(max_running=1)
    assert order(decide(jobs, full)) == ["i"]
    made = decide(jobs, full, fairness=Fairness(since_bulk=10_000))
    assert order(made) == ["old"]
    assert made.fairness.since_bulk == 0
    # For a turn, nobody pushes it out again.
    running = group(max_running=1, free_running=0, bulk_running=1)
    assert order(decide([job("i")], running, fairness=made.fairness)) == []
    assert order(decide([job("i")], running)) == ["i"]


def test_each_choice_counts_as_a_running_sequence():
    jobs = [job("a", choices=3), job("b", choices=2), job("c", enqueued_ms=NOW + 1)]
    made = decide(jobs, group(max_running=4))
    assert order(made) == ["a", "c"]
    assert made.batches[0].assignments[0].choices == 3


def test_each_choice_prefills_the_prompt():
    jobs = [job("a", 300, choices=3), job("b", 101, enqueued_ms=NOW + 1)]
    assert order(decide(jobs, group(total_blocks=1000))) == ["a"]
    room = group(total_blocks=1000, batch_tokens=1001)
    assert order(decide(jobs, room)) == ["a", "b"]


def test_more_choices_than_may_run_go_alone_to_an_empty_group():
    large = job("n", choices=6)
    assert order(decide([large, job("x", enqueued_ms=NOW + 1)], group())) == ["n"]
    assert order(decide([large], group(free_running=3))) == []
    assert order(decide([large], group(free_running=-2))) == []


def test_choices_fill_the_batch_that_is_waited_for():
    busy = group(free_running=3, step_ms=100.0)
    made = decide([job("a", choices=3)], busy, arrivals_per_s=500.0)
    assert order(made) == ["a"]


def test_a_near_deadline_goes_before_priority():
    jobs = [job("p", priority=-5), job("d", deadline_ms=NOW + 900)]
    assert order(decide(jobs, group(max_running=1))) == ["d"]


def test_priority_goes_before_arrival_and_age_makes_up_for_it():
    early = job("early", enqueued_ms=NOW - 500)
    jobs = [early, job("urgent", priority=-3)]
    assert order(decide(jobs, group(max_running=1))) == ["urgent"]
    aged = job("aged", enqueued_ms=NOW - 4_000)
    assert order(decide([aged, jobs[1]], group(max_running=1))) == ["aged"]


def test_a_flood_does_not_hide_another_tenant():
    flood = [job(f"f{i:02}", tenant="flood", enqueued_ms=NOW - 90) for i in range(50)]
    made = decide([*flood, job("one", tenant="small")], group(max_running=4))
    assert "one" in order(made)


def test_tenants_share_by_tokens_and_not_by_jobs():
    heavy = [job(f"h{i}", 90, tenant="heavy") for i in range(20)]
    light = [job(f"l{i}", 10, tenant="light") for i in range(20)]
    made = decide([*heavy, *light], group(max_running=12, total_blocks=1000))
    tokens = {"h": 0, "l": 0}
    for name in order(made):
        tokens[name[0]] += 100 if name[0] == "h" else 20
    assert abs(tokens["h"] - tokens["l"]) <= 100


def test_a_heavier_weight_is_a_larger_share():
    jobs = [job(f"{t}{i}", tenant=t) for t in "ab" for i in range(20)]
    made = decide(jobs, group(max_running=9), weights={"a": 2.0})
    assert sum(name[0] == "a" for name in order(made)) == 6


def test_buckets_are_not_mixed_in_a_batch():
    jobs = [job("s1"), job("l", 600, bucket="2048"), job("s2")]
    made = decide(jobs, group())
    assert {b.bucket: len(b.assignments) for b in made.batches} == {
        "128": 2,
        "2048": 1,
    }


def test_a_batch_stays_within_the_prefill_budget():
    jobs = [job(f"j{i}", 300) for i in range(5)]
    made = decide(jobs, group(max_running=8, total_blocks=1000))
    assert sum(b.tokens for b in made.batches) == 900


def test_a_prompt_beyond_the_budget_goes_alone_once_nothing_is_prefilled():
    big = job("big", 1500, bucket="2048")
    roomy = {"total_blocks": 1000}
    assert order(decide([big, job("s")], group(**roomy)))[0] == "big"
    assert order(decide([big, job("s")], group(**roomy, max_running=2))) == ["big"]
    assert order(decide([big], group(**roomy, free_tokens=999))) == []


def test_the_least_loaded_group_takes_the_job():
    half = group("half", free_running=2)
    made = decide([job("a")], half, group("empty"))
    assert [b.group for b in made.batches] == ["empty"]


def test_a_group_that_has_the_adapter_comes_first_among_equals():
    warm = group("warm", adapters=frozenset("x"))
    for name, adapter in (("warm", "x"), ("cold", "y"), ("cold", "")):
        made = decide([job("a", adapter=adapter)], group("cold"), warm)
        assert [b.group for b in made.batches] == [name]


def test_an_adapter_in_memory_makes_up_for_a_small_difference_alone():
    cold = group("cold", max_running=16)
    for free, name in ((14, "warm"), (13, "cold")):
        warm = group("warm", max_running=16, free_running=free, adapters=frozenset("x"))
        made = decide([job("a", adapter="x")], cold, warm)
        assert [b.group for b in made.batches] == [name]


def test_no_bulk_is_pushed_out_for_an_adapter_in_memory():
    cold = group("cold", free_blocks=10)
    warm = group("warm", free_running=0, bulk_running=4, adapters=frozenset("x"))
    made = decide([job("a", adapter="x")], cold, warm)
    assert [b.group for b in made.batches] == ["cold"]


def test_blocks_cover_prompt_and_output_of_every_choice():
    made = decide([job("a", 10, max_tokens=7, choices=3)], group())
    assert made.batches[0].assignments[0].cost_blocks == 9


def test_what_no_group_could_ever_hold_is_said_and_delays_nobody():
    jobs = [job("huge", 5000, bucket="8192"), job("ok")]
    made = decide(jobs, group())
    assert made.impossible == ("huge",)
    assert order(made) == ["ok"]
    assert decide(jobs).impossible == ()


def test_a_large_job_that_waited_gets_a_group_kept_free():
    large = job("large", 700, bucket="2048", enqueued_ms=NOW - RESERVE_AFTER_MS)
    jobs = [large, job("small", tenant="u", enqueued_ms=NOW - 1)]
    assert order(decide(jobs, group(free_blocks=20))) == []
    fresh = job("large", 700, bucket="2048", enqueued_ms=NOW - 10)
    assert order(decide([fresh, jobs[1]], group(free_blocks=20))) == ["small"]


def test_a_job_that_waits_for_prefill_credit_closes_no_group():
    waits = job("waits", 900, bucket="2048", enqueued_ms=NOW - RESERVE_AFTER_MS)
    jobs = [waits, *(job(f"b{i}", tenant="u", job_class=BULK) for i in range(3))]
    busy = group(total_blocks=1000, free_tokens=500)
    assert order(decide(jobs, busy)) == ["b0", "b1", "b2"]
    small = job("small", tenant="u", enqueued_ms=NOW - 1)
    assert order(decide([waits, small], busy)) == ["small"]


def test_smaller_prompts_do_not_take_all_prefill_credit_for_ever():
    old = NOW - PREFILL_PATIENCE_MS
    waits = job("waits", 900, bucket="2048", enqueued_ms=old)
    small = job("small", tenant="u", enqueued_ms=NOW - 1)
    busy = group(total_blocks=1000, free_tokens=500)
    assert order(decide([waits, small], busy)) == []


def test_several_choices_get_their_slots_kept_free_and_one_needs_none():
    old = NOW - RESERVE_AFTER_MS
    four = job("four", choices=4, enqueued_ms=old)
    small = job("small", tenant="u", enqueued_ms=NOW - 1)
    assert order(decide([four, small], group(free_running=2))) == []


def test_bulk_fills_what_an_interactive_job_has_kept_free():
    """It is pushed out once the others have made room."""
    large = job("large", 700, bucket="2048", enqueued_ms=NOW - RESERVE_AFTER_MS)
    jobs = [large, job("b", job_class=BULK, tenant="u"), job("i", tenant="u")]
    assert order(decide(jobs, group(free_blocks=20))) == ["b"]
    # A bulk job that waited for the same blocks would get none of them.
    bulk = [job("l", 700, bucket="2048", job_class=BULK, enqueued_ms=large.enqueued_ms)]
    bulk.append(job("b", job_class=BULK, tenant="u", enqueued_ms=NOW - 1))
    assert order(decide(bulk, group(free_blocks=20))) == []


def test_a_job_in_mid_output_goes_before_the_rest_of_its_tenant_and_class():
    cut = job("cut", started=True, priority=50)
    rest = [job(f"r{i}", enqueued_ms=NOW - 50_000) for i in range(9)]
    urgent = job("urgent", deadline_ms=NOW + 6_000, priority=-9)
    full = group(free_running=1)
    assert order(decide([*rest, urgent, cut], full)) == ["cut"]
    bulk = job("cut", started=True, job_class=BULK)
    assert order(decide([rest[0], bulk], full)) == ["r0"]


def test_jobs_in_mid_output_take_nothing_from_another_tenant():
    cut = [job(f"c{i}", started=True, enqueued_ms=NOW - 500) for i in range(9)]
    other = job("other", tenant="u")
    before = Fairness(clock=100, served={"t": 500}, served_at_ms={"t": NOW})
    made = decide([*cut, other], group(free_running=1), fairness=before)
    assert order(made) == ["other"]


def test_a_job_in_mid_output_does_not_hold_back_what_is_urgent_behind_it():
    cut = job("cut", started=True, priority=90)
    urgent = job("urgent", priority=-90)
    other = job("other", tenant="u", enqueued_ms=NOW - 1)
    before = Fairness(clock=100, served={"t": 500}, served_at_ms={"t": NOW})
    made = decide([cut, urgent, other], group(free_running=2), fairness=before)
    assert order(made) == ["cut", "urgent"]


def test_an_expired_job_is_left_to_the_reaper():
    assert order(decide([job("late", deadline_ms=NOW)], group())) == []


def test_accounts_of_the_absent_are_forgotten():
    before = Fairness(clock=100.0, served={"gone": 90.0, "ahead": 150.0})
    made = decide([job("a")], group(), fairness=before)
    assert set(made.fairness.served) == {"ahead", "t"}


def test_a_deadline_is_urgent_by_when_the_job_has_to_start():
    slow = group(max_running=1, step_ms=100.0)
    jobs = [job("p", priority=-5), job("d", max_tokens=100, deadline_ms=NOW + 14_000)]
    assert order(decide(jobs, slow)) == ["d"]
    assert order(decide(jobs, group(max_running=1, step_ms=1.0))) == ["p"]


def test_a_job_that_cannot_end_in_time_waits_on_until_then():
    late = job("late", max_tokens=100, deadline_ms=NOW + 1)
    made = decide([late], group(step_ms=100.0))
    assert (order(made), made.impossible) == (["late"], ())


def test_expected_output_is_charged_by_what_was_made():
    jobs = [job("a", 100, max_tokens=1000, choices=2)]
    whole = {"total_blocks": 1000}
    assert decide(jobs, group(**whole)).fairness.served == {"t": 2200.0}
    made = decide(jobs, group(**whole), made_ratio={JobClass.INTERACTIVE: 0.1})
    assert made.fairness.served == {"t": 400.0}


def test_a_newer_record_goes_where_it_is_read_and_waits_otherwise():
    new = job("new", schema=2)
    made = decide([new], group("old"))
    assert (order(made), made.impossible) == ([], ())
    made = decide([new], group("old"), group("new", schema=2, free_running=1))
    assert [batch.group for batch in made.batches] == ["new"]
