"""Who goes first where the engine has less room than requests."""

import msgspec
import pytest
from support.engine_driver import Stream, drain, request
from support.fake_runner import FakeRunner

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.kv.manager import KVManager
from tokenmill.workers.engine.planner import plan_step
from tokenmill.workers.engine.preemption import make_room
from tokenmill.workers.engine.roster import Roster
from tokenmill.workers.engine.sequence import PATIENCE, Sequence

TABLE = TokenTable.for_bytes()


def make(slots: int = 1) -> Engine:
    # Chunks that follow the clock would make the steps of a test differ.
    return Engine(
        FakeRunner(),
        TABLE,
        max_running=slots,
        kv_overcommit=16.0,
        step_target_ms=0.0,
    )


def of(job_class: JobClass, name: str, prompt: list[int], *, priority: int = 5, **kept):
    made = request(name, prompt, **{"max_tokens": 1, "ignore_eos": True, **kept})
    return msgspec.structs.replace(made, job_class=job_class, priority=priority)


@pytest.mark.parametrize(
    ("job_class", "passed_by"),
    # Bulk that has waited so long does not even wait for what runs: that yields.
    [(JobClass.INTERACTIVE, PATIENCE + 1), (JobClass.BULK, PATIENCE)],
)
def test_who_has_waited_long_goes_before_its_class_one_at_a_time(job_class, passed_by):
    engine = make()
    engine.add(of(job_class, "n0", [1, 2], priority=0))
    for index in range(3):
        engine.add(of(job_class, f"old{index}", [index, 5]))
    stream, came = Stream(), 1
    while not {"old0", "old1", "old2"} <= stream.finished.keys():
        assert came < 100, "the less urgent starve"
        while engine.capacity().num_running < 3 + 3:
            engine.add(of(job_class, f"n{came}", [came, 3], priority=0))
            came += 1
        stream.take(engine.step())
    order = list(stream.finished)
    ends = [order.index(f"old{index}") for index in range(3)]
    assert ends == [passed_by, 2 * passed_by, 3 * passed_by]


def test_interactive_requests_that_go_first_set_no_bulk_back():
    engine = make()
    engine.add(of(JobClass.BULK, "low", [1, 2], max_tokens=2))
    engine.add(of(JobClass.BULK, "high", [2, 2], priority=0))
    stream = Stream()
    for index in range(3 * PATIENCE):
        engine.add(of(JobClass.INTERACTIVE, f"i{index}", [index, 3]))
        stream.take(engine.step())
    drain(engine, stream)
    assert list(stream.finished)[-2:] == ["high", "low"]


def test_a_request_overtakes_once_however_many_choices_it_has():
    engine = make(slots=PATIENCE)
    bulk = JobClass.BULK
    engine.add(of(bulk, "here", [1, 2], n=PATIENCE, max_tokens=4))
    engine.add(of(bulk, "old", [3, 4]))
    engine.add(of(bulk, "many", [5, 6], n=PATIENCE, priority=0, max_tokens=3))
    engine.add(of(bulk, "one", [7, 8], n=PATIENCE, priority=0))
    stream = Stream()
    drain(engine, stream)
    assert list(stream.finished) == ["here", "many", "one", "old"]


def test_a_plan_without_the_most_urgent_may_stand_still_for_one_step_only():
    kv = KVManager(2, 4)
    roster = Roster(kv, 2, overcommit=4.0)
    both = [
        Sequence(
            request(name, range(4), max_tokens=4),
            0,
            max_output=4,
            eos_ids=frozenset(),
            source=TABLE,
            arrival=arrival,
        )
        for arrival, name in enumerate(("urgent", "other"))
    ]
    for sequence in both:
        sequence.allocation = kv.open(None)
        kv.grow(sequence.allocation, 4)
        sequence.num_computed = 4
        sequence.accept(1, None)
        roster.running.append(sequence)
    assert make_room(plan_step(both[1:], 8), roster) == ()
    ran = make_room(plan_step(both, 8), roster)
    assert [part.sequence for part in ran] == both[:1]
    assert roster.waiting == both[1:]
