"""Turns of bulk that interactive work has pushed out."""

import msgspec
from support.policy_cases import NOW, decide, group, job, order

from tokenmill.scheduler.snapshot import Fairness
from tokenmill.scheduler.turns import BULK_PATIENCE_MS, BULK_TURN_MS


def test_bulk_pushed_out_for_long_gets_its_room_back():
    pushed = group(free_running=-2, bulk_running=3)
    jobs = [job("i")]
    first = decide(jobs, pushed)
    assert first.fairness.pushed_ms == {"w": NOW}
    assert order(first) == ["i"]
    since = Fairness(pushed_ms={"w": NOW - BULK_PATIENCE_MS})
    assert order(decide(jobs, pushed, fairness=since)) == []
    other = group("other")
    assert order(decide(jobs, pushed, other, fairness=since)) == ["i"]
    # With its room back it keeps it for a turn, and then counts from the start.
    back = group(free_running=1, bulk_running=3)
    kept = decide(jobs, back, fairness=since).fairness
    assert (kept.pushed_ms, kept.restored_ms) == (since.pushed_ms, {"w": NOW})
    past = msgspec.structs.replace(since, restored_ms={"w": NOW - BULK_TURN_MS})
    assert decide(jobs, back, fairness=past).fairness.pushed_ms == {}


def test_a_turn_lasts_as_long_when_its_room_comes_back_late():
    long_ago = {"w": NOW - 3 * BULK_PATIENCE_MS}
    jobs = [job("i0"), job("i1")]
    back = group(free_running=0, bulk_running=2)
    kept = decide(jobs, back, fairness=Fairness(pushed_ms=long_ago))
    assert order(kept) == []
    assert kept.fairness.restored_ms == {"w": NOW}
    later = msgspec.structs.replace(
        kept.fairness, restored_ms={"w": NOW - BULK_TURN_MS + 1}
    )
    assert order(decide(jobs, back, fairness=later)) == []
    over = msgspec.structs.replace(later, restored_ms={"w": NOW - BULK_TURN_MS})
    assert order(decide(jobs, back, fairness=over)) == ["i0", "i1"]
