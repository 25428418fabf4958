"""What one read of the lanes brings, and what it says of the rest."""

import asyncio
import threading

from support.waiting import wait_until

from tokenmill.scheduler.bell import Bell, Ring, listen, parse_ring
from tokenmill.scheduler.groups import GroupReader
from tokenmill.scheduler.reading import REMEMBERED, LaneReader
from tokenmill.scheduler.snapshot import WaitingJob
from tokenmill.scheduler.tokenizing import INLINE_BYTES, RawJob, TokenizerThread
from tokenmill.scheduler.waiting import Ready, WaitingRoom
from tokenmill.shared.keys import Keys
from tokenmill.shared.messages import JobClass, JobRequest, ModelCard, encode
from tokenmill.shared.tokens import BYTES

KEYS = Keys("tiny", 0)
CARD = ModelCard(
    model="tiny",
    tokenizer=BYTES,
    max_context=100_000,
    vocab_size=257,
    has_chat_template=False,
    weights_version="w",
)


async def put(client, lane: int, count: int, kind: str = "interactive") -> str:
    key = KEYS.queue(kind, "128", lane)
    for number in range(count):
        await client.xadd(key, {"id": f"{lane}.{number}"})
    await client.zadd(KEYS.lanes, {f"{kind}:128:{lane}": lane})
    return key


def reader(client, room: WaitingRoom | None = None, ahead: int = 4) -> LaneReader:
    room = WaitingRoom() if room is None else room
    return LaneReader(client, KEYS, JobClass.INTERACTIVE, room, ahead)


def waiting(number: int) -> WaitingJob:
    return WaitingJob(
        id=str(number),
        tokens=1,
        max_tokens=1,
        bucket="128",
        tenant="t",
        enqueued_ms=0,
    )


def ids(entries) -> list[str]:
    return [fields[b"id"].decode() for _, _, fields in entries]


async def test_every_entry_is_read_once_whatever_lanes_are_remembered(redis_client):
    lanes = reader(redis_client)
    seen: list[str] = []
    for lane in range(REMEMBERED + 3):
        await put(redis_client, lane, 2)
        entries, _ = await lanes.read()
        seen += ids(entries)
    for lane in (0, REMEMBERED + 2):  # one is forgotten by now, one is remembered
        await put(redis_client, lane, 1)
    entries, _ = await lanes.read()
    assert len(seen) == 2 * (REMEMBERED + 3)
    assert sorted(ids(entries)) == sorted(["0.0", f"{REMEMBERED + 2}.0"])
    assert (await lanes.read())[0] == []


async def test_a_read_says_whether_it_left_entries_behind(redis_client):
    lanes = reader(redis_client, ahead=4)
    await put(redis_client, 1, 6)
    assert len((await lanes.read())[0]) == 4
    assert lanes.full
    assert len((await lanes.read())[0]) == 2
    assert not lanes.full


async def test_a_lane_with_enough_in_memory_is_left_out_and_that_is_told(redis_client):
    room = WaitingRoom()
    lanes = reader(redis_client, room, ahead=4)
    key = await put(redis_client, 1, 6)
    await lanes.read()
    for number in range(3):
        room.add(Ready(waiting(number), b"", key, "1-0"))
    assert (await lanes.read())[0] == []
    assert lanes.held_back
    room.take_all(("0", "1", "2"))
    assert len((await lanes.read())[0]) == 2
    assert not lanes.held_back


async def test_resume_is_read_up_to_a_bound_that_no_lane_shares(
    redis_client, monkeypatch
):
    monkeypatch.setattr("tokenmill.scheduler.waiting.MOST_RESUMED_JOBS", 2)
    room = WaitingRoom()
    lanes = reader(redis_client, room)
    for number in range(3):
        await redis_client.xadd(KEYS.resume, {"id": f"r{number}"})
        room.add(Ready(waiting(number), b"", KEYS.resume, "1-0", resumed=True))
    await put(redis_client, 1, 1)
    assert ids((await lanes.read())[0]) == ["1.0"]
    assert lanes.held_back
    room.take_all(("0", "1"))
    assert ids((await lanes.read())[0]) == ["r0", "r1", "r2"]
    assert not lanes.held_back


async def test_a_stranger_among_the_lanes_does_not_hide_the_others(redis_client):
    lanes = reader(redis_client)
    await put(redis_client, 1, 1)
    assert ids((await lanes.read())[0]) == ["1.0"]
    await put(redis_client, 1, 1)
    await redis_client.set(KEYS.queue("interactive", "128", 2), "x")
    await redis_client.zadd(KEYS.lanes, {"interactive:128:2": 2})
    found = ids((await lanes.read())[0])
    while lanes.full:
        found += ids((await lanes.read())[0])
    assert found == ["1.0"]


async def test_other_reads_share_the_round_trip(redis_client):
    await redis_client.set("a", "1")
    await put(redis_client, 1, 1)
    entries, replies = await reader(redis_client).read([("MGET", "a", "b")])
    assert (ids(entries), replies) == (["1.0"], [[b"1", None]])


async def test_groups_read_along_serve_one_plan(redis_client):
    facts = {"group": "g", "state": "ready", "total_blocks": 8, "max_running": 2}
    facts |= {"block_size": 8, "batch_tokens": 64, "credit_blocks": 8}
    await redis_client.hset(KEYS.group("g"), mapping=facts)
    await redis_client.zadd(KEYS.groups, {"g": 1})
    groups = GroupReader(redis_client, KEYS)
    assert [view.free_blocks for view in await groups.current()] == [8]
    pipe = redis_client.pipeline(transaction=False)
    for command in groups.commands():
        pipe.execute_command(*command)
    replies = await pipe.execute()
    await redis_client.hset(KEYS.group("g"), "credit_blocks", 3)
    groups.keep(replies)
    assert [view.free_blocks for view in await groups.current()] == [8]
    assert [view.free_blocks for view in await groups.current()] == [3]


def test_the_bells_message_names_few_arrivals_and_may_be_anything():
    ring = parse_ring(b"enqueue interactive:tiny.0.a bulk:tiny.0.b")
    assert ring.arrivals == (("interactive", "tiny.0.a"), ("bulk", "tiny.0.b"))
    assert parse_ring(b"room") == Ring("room")
    assert parse_ring(b"\xff\x00 x : :y").word == "\ufffd\x00"
    assert len(parse_ring(b"enqueue" + b" bulk:x" * 999).arrivals) <= 16


async def test_a_bell_rings_only_whom_it_concerns(redis_client):
    every, some = Bell(), Bell(lambda ring: ring.word == "enqueue")
    task = asyncio.create_task(listen(redis_client, KEYS.bell, [every, some]))
    await asyncio.wait_for(every.wait(), 60)
    every.clear()
    await redis_client.publish(KEYS.bell, "room")
    await asyncio.wait_for(every.wait(), 60)
    assert not some.is_set()
    await redis_client.publish(KEYS.bell, "enqueue")
    await asyncio.wait_for(some.wait(), 60)
    task.cancel()


class SlowTokenizer:
    """Notes its threads; holds every long text until it is let go."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.inside = 0
        self.go_on = threading.Event()

    def encode_requests(self, requests, _longest):
        assert not self.inside
        self.inside += 1
        self.threads.append(threading.current_thread().name)
        if any(len(request.text) > INLINE_BYTES for request in requests):
            assert self.go_on.wait(60)
        self.inside -= 1
        return [[1, 2] for _ in requests]


async def test_tokenizers_never_meet_two_threads_at_once():
    owner, tokenizer = TokenizerThread(), SlowTokenizer()
    owner._loaded[BYTES] = tokenizer
    long = RawJob(encode(JobRequest(text="x" * 10 * INLINE_BYTES)), None)
    short = RawJob(encode(JobRequest(text="xy")), None)
    first = asyncio.create_task(owner.prepare([long], CARD, 10**9))
    await wait_until(lambda: tokenizer.inside)
    first.cancel()  # the thread goes on all the same
    second = asyncio.create_task(owner.prepare([short], CARD, 10**9))
    await asyncio.wait({first})
    assert not second.done()
    tokenizer.go_on.set()
    assert [one.tokens for one in await second] == [2]
    assert [one.tokens for one in await owner.prepare([short], CARD, 10**9)] == [2]
    assert [name.partition("_")[0] for name in tokenizer.threads] == [
        "tokenizer",
        "tokenizer",
        threading.current_thread().name,
    ]
    owner.close()
