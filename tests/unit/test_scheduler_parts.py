"""Small parts of the scheduler: entries, the waiting room, clocks, group views."""

import inspect

import msgspec
import pytest

from tokenmill.scheduler.clock import ArrivalRate, RedisClock
from tokenmill.scheduler.dispatching import Dispatcher
from tokenmill.scheduler.entries import Stream, lane_stream, parse_entry
from tokenmill.scheduler.groups import view_of
from tokenmill.scheduler.snapshot import WaitingJob
from tokenmill.scheduler.waiting import (
    CANDIDATES,
    MOST_JOBS,
    MOST_RESUMED_JOBS,
    Ready,
    WaitingRoom,
)
from tokenmill.shared.errors import ProtocolError
from tokenmill.shared.keys import Keys
from tokenmill.shared.messages import JobClass
from tokenmill.shared.script_types import DispatchReply, GroupInfo

KEYS = Keys("tiny", 0)
LANE = Stream(KEYS.queue("bulk", "128", 7), JobClass.BULK)
ID = b"tiny.0.aaaaaaaaaaaaaaaa"
FIELDS = {
    b"id": ID,
    b"tenant": b"t",
    b"priority": b"-3",
    b"deadline": b"5000",
    b"bytes": b"12",
}


def ready(name: str, stream: str = "s", tokens: int = 1, **fields: object) -> Ready:
    job = WaitingJob(
        id=name,
        tokens=tokens,
        max_tokens=1,
        bucket="128",
        enqueued_ms=0,
        **{"tenant": "t", **fields},  # type: ignore[arg-type]
    )
    return Ready(job, b"", stream, "1-0")


def resumed(name: str, **fields: object) -> Ready:
    return Ready(ready(name, **fields).job, b"", KEYS.resume, "1-0", resumed=True)


def test_an_entry_is_read_with_its_lanes_class():
    entry = parse_entry(KEYS, LANE, b"1000-5", FIELDS, now_ms=2000)
    assert (entry.job_class, entry.priority, entry.tenant) == (JobClass.BULK, -3, "t")
    assert (entry.deadline_ms, entry.num_bytes, entry.enqueued_ms) == (5000, 12, 1000)
    assert not entry.resumed


def test_a_resumed_entry_names_its_class():
    stream = Stream(KEYS.resume, None)
    fields = {**FIELDS, b"class": b"interactive"}
    entry = parse_entry(KEYS, stream, b"1-0", fields, 2000)
    assert (entry.job_class, entry.resumed) == (JobClass.INTERACTIVE, True)
    assert entry.losses == 0
    lost = parse_entry(KEYS, stream, b"1-0", {**fields, b"losses": b"2"}, 2000)
    assert lost.losses == 2
    assert not lost.started
    cut = parse_entry(KEYS, stream, b"1-0", {**fields, b"started": b"1"}, 2000)
    assert cut.started
    with pytest.raises(ProtocolError, match="class"):
        parse_entry(KEYS, stream, b"1-0", FIELDS, 2000)


def test_no_entry_is_from_the_future():
    entry = parse_entry(KEYS, LANE, b"99999999999999-0", FIELDS, now_ms=2000)
    assert entry.enqueued_ms == 2000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"id", b"nonsense"),
        (b"id", b"tiny.1.aaaaaaaaaaaaaaaa"),
        (b"id", b"\xff"),
        (b"tenant", b"a:b"),
        (b"priority", b"101"),
        (b"priority", b"9" * 5000),
        (b"deadline", b"soon"),
        (b"bytes", b"-1"),
    ],
)
def test_a_wrong_field_is_named(name: bytes, value: bytes):
    with pytest.raises(ProtocolError, match=f"field {name.decode()}"):
        parse_entry(KEYS, LANE, b"1-0", {**FIELDS, name: value}, 2000)


@pytest.mark.parametrize("name", [b"id", b"tenant", b"priority"])
def test_a_missing_field_is_named(name: bytes):
    fields = {k: v for k, v in FIELDS.items() if k != name}
    with pytest.raises(ProtocolError, match=f"field {name.decode()} is missing"):
        parse_entry(KEYS, LANE, b"1-0", fields, 2000)


def test_only_lanes_are_lanes():
    assert lane_stream(KEYS, b"bulk:128:7") == LANE
    for member in (b"bulk:128", b"slow:128:7", b"bulk:128:x", b"\xff", b"a:b:c:d"):
        assert lane_stream(KEYS, member) is None


def test_the_room_counts_and_gives_back():
    room = WaitingRoom()
    room.add(ready("a"))
    room.add(ready("b"))
    room.add(ready("a", stream="resume"))
    assert (len(room), room.count("s"), room.count("resume")) == (2, 1, 1)
    taken = room.take("a")
    assert taken is not None
    assert taken.stream == "resume"
    assert room.take("a") is None
    room.unfetched["s"] += 3  # their lane is not read on for them either
    assert (room.count("s"), len(room)) == (4, 1)
    assert "b" in room


def test_every_stream_has_candidates_however_long_another_is():
    room = WaitingRoom()
    for i in range(CANDIDATES + 10):
        room.add(ready(f"long{i}", stream="long"))
    room.add(ready("one", stream="short"))
    names = {job.id for job in room.candidates()}
    assert "one" in names
    assert len(names) <= CANDIDATES


def test_full_bulk_lanes_stop_nothing_else_from_being_read():
    room = WaitingRoom()
    for i in range(MOST_JOBS):
        room.add(ready(f"j{i}", job_class=JobClass.BULK))
    assert not room.accepts(JobClass.BULK)
    assert room.accepts(JobClass.INTERACTIVE)
    assert room.accepts(None)


def test_a_flood_through_resume_hides_nobody_and_stops_no_lane():
    room = WaitingRoom()
    for i in range(MOST_RESUMED_JOBS):
        room.add(resumed(f"flood{i}", job_class=JobClass.BULK))
    room.add(resumed("other", tenant="b"))
    room.add(resumed("cut", started=True, job_class=JobClass.BULK))
    assert {"other", "cut"} <= {job.id for job in room.candidates()}
    assert not room.accepts(None)
    assert room.accepts(JobClass.BULK)
    assert room.accepts(JobClass.INTERACTIVE)
    taken = room.take("other")
    assert taken is not None
    assert taken.stream == KEYS.resume


def test_expired_jobs_are_found():
    room = WaitingRoom()
    room.add(ready("late", deadline_ms=10))
    room.add(ready("never"))
    assert room.expired(9) == []
    assert room.expired(10) == ["late"]
    assert room.expired(10) == []  # told of once: the caller takes it out


def test_a_job_that_left_or_came_back_later_is_not_expired():
    room = WaitingRoom()
    room.add(ready("gone", deadline_ms=10))
    room.take("gone")
    room.add(ready("again", deadline_ms=10))
    room.add(ready("again", deadline_ms=30))
    assert room.expired(20) == []
    assert room.expired(30) == ["again"]


def test_candidates_are_bounded_however_many_streams_there_are():
    room = WaitingRoom()
    for i in range(CANDIDATES + 100):
        room.add(ready(f"j{i}", stream=f"s{i // 2}"))
    assert len(room.candidates()) <= CANDIDATES
    assert {job.id for job in room.candidates()} >= {f"j{i}" for i in range(0, 999, 2)}


def test_the_clock_follows_redis_and_not_the_wall():
    local = [100.0]
    clock = RedisClock(lambda: local[0])
    clock.observe(5000, 250_000)
    local[0] += 1.5
    assert clock.now_ms() == 5_001_750


def test_arrivals_are_forgotten():
    local = [0.0]
    rate = ArrivalRate(lambda: local[0])
    rate.add(100)
    assert rate.per_second() == 100
    local[0] = 10.0
    assert rate.per_second() < 0.01


def test_a_group_that_drains_or_is_incomplete_is_not_used():
    whole = GroupInfo(
        group="w",
        total_blocks=10,
        max_running=4,
        batch_tokens=100,
        block_size=8,
        max_context=64,
        weights_version="v",
        step_fit_ms=(5.0, 0.5),
        credit_blocks=3,
        credit_running=2,
        credit_tokens=40,
    )
    view = view_of(whole)
    assert view is not None
    assert (view.free_blocks, view.free_running, view.free_tokens) == (3, 2, 40)
    assert view.step_ms == 5.0 + 0.5 * (2 + 60)
    assert not view.idle
    assert (view.serves, view.alone, view.bulk_running, view.schema) == (
        "any",
        "",
        0,
        1,
    )
    bulk = {"bulk_blocks": 3, "bulk_running": 2, "bulk_tokens": -1}
    more = {"serves": "long", "alone": "job", "schema": 2, **bulk}
    view = view_of(msgspec.structs.replace(whole, **more))
    assert view is not None
    assert (view.serves, view.alone, view.schema) == ("long", "job", 2)
    assert (view.bulk_blocks, view.bulk_running, view.bulk_tokens) == (3, 2, 0)
    later = view_of(msgspec.structs.replace(whole, serves="huge"))
    assert later is not None
    assert later.serves == "any"
    for change in ({"state": "draining"}, {"block_size": 0}, {"group": ""}):
        assert view_of(msgspec.structs.replace(whole, **change)) is None


def test_a_group_that_does_not_read_a_record_is_not_offered_it_again():
    """Else the next plan gives it the same job, since the payload says less."""
    room = WaitingRoom()
    dispatcher = Dispatcher(
        **dict.fromkeys(inspect.signature(Dispatcher).parameters)
        | {"room": room, "name": "x"}  # type: ignore[arg-type]
    )
    sent = ready("newer")
    assert dispatcher._settle([sent], [DispatchReply("newer", "newer", 2)])
    (job,) = room.candidates()
    assert (job.id, job.schema) == ("newer", 2)
