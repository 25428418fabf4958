"""One job against an endless, more urgent flood: it is served within a bound."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.scheduler.policy import plan
from tokenmill.scheduler.snapshot import Fairness, GroupView, Snapshot, WaitingJob
from tokenmill.shared.keys import bucket_of
from tokenmill.shared.messages import JobClass

BULK = JobClass.BULK
BOUNDS = (128, 512, 2048, 8192)
START = 10_000_000
TICK_MS, RUN_MS = 250, 700
BLOCKS, RUNNING, BUDGET = 600, 4, 4096


def job(name: str, tokens: int, now: int, **fields: object) -> WaitingJob:
    defaults: dict[str, object] = {"tenant": "flood", "max_tokens": 10}
    return WaitingJob(
        id=name,
        tokens=tokens,
        bucket=bucket_of(tokens, BOUNDS),
        enqueued_ms=now,
        **{**defaults, **fields},
    )


class Group:
    """Every job runs for a fixed time; prefill is done by the next plan."""

    def __init__(self, name: str, serves: str = "any") -> None:
        self.name, self.serves = name, serves
        self.held: list[tuple[int, int, WaitingJob]] = []

    def view(self, now: int) -> GroupView:
        self.held = [entry for entry in self.held if entry[0] > now]
        bulk = [entry for entry in self.held if entry[2].job_class is BULK]
        alone = [entry[2].id for entry in self.held if entry[2].alone]
        return GroupView(
            group=self.name,
            total_blocks=BLOCKS,
            max_running=RUNNING,
            batch_tokens=BUDGET,
            block_size=8,
            max_context=8192,
            free_blocks=BLOCKS - sum(cost for _, cost, _ in self.held),
            free_running=RUNNING - len(self.held),
            free_tokens=BUDGET,
            bulk_blocks=sum(cost for _, cost, _ in bulk),
            bulk_running=len(bulk),
            alone="".join(alone),
            serves=self.serves,  # type: ignore[arg-type]
        )


def served_after_s(
    victims: list[WaitingJob], flood: Iterator[list[WaitingJob]], groups: list[Group]
) -> float:
    """Returns when the last of the victims was given to a group."""
    waiting = {victim.id: victim for victim in victims}
    missing = set(waiting)
    fairness, by_name = Fairness(), {group.name: group for group in groups}
    for now in range(START, START + 300_000, TICK_MS):
        waiting |= {j.id: j for j in next(flood)}
        waiting = {k: j for k, j in waiting.items() if (j.deadline_ms or now + 1) > now}
        # As the waiting room has it: the front of every lane.
        seen = sorted(waiting.values(), key=lambda j: (j.id not in missing, j.id))[:150]
        views = tuple(group.view(now) for group in groups)
        made = plan(Snapshot(jobs=tuple(seen), groups=views, fairness=fairness), now)
        fairness = made.fairness
        for batch in made.batches:
            for given_out in batch.assignments:
                found = waiting.pop(given_out.job_id)
                entry = (now + RUN_MS, given_out.cost_blocks, found)
                by_name[batch.group].held.append(entry)
                missing.discard(found.id)
        if not missing:
            return (now - START) / 1000
    raise AssertionError(f"{missing} were not served in 300 s")


def urgent(tokens: int, per_tick: int) -> Iterator[list[WaitingJob]]:
    """More work than there is room for, all of it with the nearest deadlines."""
    for tick in itertools.count():
        now = START + tick * TICK_MS
        yield [
            job(f"z{tick:05}-{i}", tokens, now, priority=-2, deadline_ms=now + 4_000)
            for i in range(per_tick)
        ]


@given(
    st.sampled_from(JobClass),
    st.integers(-2, 2),
    st.one_of(st.integers(1, 400), st.integers(1, 4700)),
    st.sampled_from([1, 100, 2000]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_nothing_starves_in_a_flood(
    victim_class: JobClass,
    priority: int,
    tokens: int,
    flood_tokens: int,
    own_tenant: bool,
    alone: bool,
    groups: int,
):
    victim = job(
        "victim",
        tokens,
        START,
        job_class=victim_class,
        priority=priority,
        tenant="flood" if own_tenant else "small",
        alone=alone,
    )
    pool = [Group(f"w{i}") for i in range(groups)]
    flood = urgent(flood_tokens, 3 * groups)
    assert served_after_s([victim], flood, pool) <= 90


@given(st.sampled_from(["short", "long"]), st.sampled_from(JobClass))
@settings(deadline=None, max_examples=8)
def test_the_flooded_length_class_has_its_share_too(length: str, kind: JobClass):
    tokens = 100 if length == "short" else 3000
    victim = job("victim", tokens, START, job_class=kind, tenant="small")
    pool = [Group("w0", "short"), Group("w1", "long")]
    assert served_after_s([victim], urgent(tokens, 6), pool) <= 90


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_many_suspects_and_the_work_beside_them_all_get_their_turn(groups: int):
    suspects = [job(f"s{i:02}", 50, START, alone=True) for i in range(16)]
    ordinary = [job(f"o{i:02}", 50, START, tenant="small") for i in range(40)]
    pool = [Group(f"w{i}") for i in range(groups)]
    assert served_after_s(suspects + ordinary, itertools.repeat([]), pool) <= 60
    pool = [Group(f"w{i}") for i in range(groups)]
    busy = served_after_s(suspects, urgent(50, 3 * groups), pool)
    assert busy <= 100


def test_suspects_do_not_hold_up_the_others_of_a_pool_of_one():
    suspects = [job(f"s{i:02}", 50, START, alone=True) for i in range(16)]
    one = job("one", 50, START, tenant="small")
    pool = [Group("w")]
    everything = [*suspects, one]
    assert served_after_s(everything, itertools.repeat([]), pool) > 4
    waiting = {j.id: j for j in everything}
    fairness, group = Fairness(), Group("w")
    for now in range(START, START + 10_000, TICK_MS):
        made = plan(
            Snapshot(
                jobs=tuple(waiting.values()),
                groups=(group.view(now),),
                fairness=fairness,
            ),
            now,
        )
        fairness = made.fairness
        for batch in made.batches:
            for given_out in batch.assignments:
                found = waiting.pop(given_out.job_id)
                group.held.append((now + RUN_MS, given_out.cost_blocks, found))
        if "one" not in waiting:
            assert now - START <= 2 * RUN_MS
            return
    raise AssertionError("the ordinary job waits behind every suspect")
