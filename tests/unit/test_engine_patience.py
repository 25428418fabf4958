"""Who goes first where the engine has less room than requests."""

import msgspec
from support.engine_driver import Stream, request
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


def test_bulk_that_has_waited_long_goes_first_one_at_a_time():
    engine = Engine(FakeRunner(), TABLE, max_running=1, kv_overcommit=16.0)
    engine.add(request("i0", [1, 2], max_tokens=1))
    for index in range(3):
        bulk = request(f"bulk{index}", [index, 5], max_tokens=1)
        engine.add(msgspec.structs.replace(bulk, job_class=JobClass.BULK))
    stream, came = Stream(), 1
    while not {"bulk0", "bulk1", "bulk2"} <= stream.finished.keys():
        assert came < 100, "bulk starves"
        while engine.capacity().num_running < 3 + 3:
            engine.add(request(f"i{came}", [came, 3], max_tokens=1))
            came += 1
        stream.take(engine.step())
    order = list(stream.finished)
    ends = [order.index(f"bulk{index}") for index in range(3)]
    assert ends == [PATIENCE + 1, 2 * PATIENCE + 2, 3 * PATIENCE + 3]


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
