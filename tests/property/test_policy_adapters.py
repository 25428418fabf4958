"""Adapters in memory are a preference: nothing waits for one, none crowds a group."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.policy_cases import NOW, decide, group, job

from tokenmill.scheduler.packing import WARM_LOAD
from tokenmill.scheduler.policy import plan
from tokenmill.scheduler.rooms import Room
from tokenmill.scheduler.snapshot import GroupView, Plan, Snapshot, WaitingJob

ADAPTERS = ("", "x", "y")


@st.composite
def groups(draw: st.DrawFn, index: int) -> GroupView:
    slots = draw(st.integers(1, 16))
    return group(
        f"w-{index}",
        max_running=slots,
        free_running=draw(st.integers(0, slots)),
        free_blocks=draw(st.integers(0, 100)),
        free_tokens=draw(st.integers(0, 1000)),
        adapters=frozenset(draw(st.sets(st.sampled_from(ADAPTERS[1:])))),
    )


@st.composite
def jobs(draw: st.DrawFn, index: int, tokens: int) -> WaitingJob:
    return job(
        f"j{index:02}",
        tokens,
        adapter=draw(st.sampled_from(ADAPTERS)),
        tenant=draw(st.sampled_from("ab")),
        enqueued_ms=NOW - draw(st.integers(0, 90_000)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Jobs of one size, so that how many a group takes does not hang on which."""
    tokens = draw(st.integers(1, 200))
    return Snapshot(
        jobs=tuple(draw(jobs(i, tokens)) for i in range(draw(st.integers(0, 30)))),
        groups=tuple(draw(groups(i)) for i in range(draw(st.integers(1, 5)))),
    )


def given_out(made: Plan) -> dict[str, str]:
    return {a.job_id: b.group for b in made.batches for a in b.assignments}


@given(snapshots())
@settings(deadline=None, max_examples=60)
def test_what_is_dispatched_does_not_depend_on_adapters_in_memory(
    snapshot: Snapshot,
) -> None:
    cold = tuple(replace(one, adapters=frozenset()) for one in snapshot.groups)
    without = plan(replace(snapshot, groups=cold), NOW)
    made = plan(snapshot, NOW)
    assert given_out(made).keys() == given_out(without).keys()
    assert made.wake_in_ms == without.wake_in_ms
    assert made.fairness == without.fairness


@given(st.lists(st.sampled_from(ADAPTERS), max_size=30), st.data())
@settings(deadline=None, max_examples=30)
def test_a_preferred_group_is_hardly_fuller_than_another(
    adapters: list[str], data: st.DataObject
) -> None:
    """One job after the other, as each meets the groups."""
    views = {f"w-{i}": data.draw(groups(i)) for i in range(4)}
    for number, adapter in enumerate(adapters):
        one = job(f"j{number:02}", adapter=adapter)
        placed = given_out(decide([one], *views.values())).get(one.id)
        rooms = {name: Room(view) for name, view in views.items()}
        fitting = {name: room for name, room in rooms.items() if room.fits(one)}
        if placed is None:
            assert not fitting
            continue
        least = min(room.load for room in fitting.values())
        if adapter and adapter in views[placed].adapters:
            assert rooms[placed].load <= least + WARM_LOAD
        else:
            assert rooms[placed].load == least
        rooms[placed].take(one)
        views[placed] = replace(
            views[placed],
            free_blocks=rooms[placed].blocks,
            free_running=rooms[placed].running,
            free_tokens=rooms[placed].tokens,
        )
