"""The driver of a bulk run against a run in memory: what it does in bad weather."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.fake_run import SPEC, FakeRun, ListSource, MemorySink, done, fed, succeed
from support.waiting import loop_turns, wait_until

from tokenmill.producer.bulk import driver as driver_module
from tokenmill.producer.bulk import feeding
from tokenmill.producer.bulk.driver import BulkDriver
from tokenmill.producer.bulk.flow import Entry, Progress, Refused, Report
from tokenmill.producer.bulk.window import Window
from tokenmill.shared.bulk.messages import FeedStatus, Item, Outcome
from tokenmill.shared.errors import BulkOutputFailed, InputUnreadable
from tokenmill.shared.messages import JobError


class Client:
    """A client whose connections nobody uses."""

    session: Any = None


class Driven:
    """Drives a run in memory; may be driven again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = FakeRun(succeed)
        self.sink = MemorySink()
        self.progress: list[Progress] = []
        monkeypatch.setattr(driver_module, "StoreCalls", lambda *_, **__: self.run)
        monkeypatch.setattr(driver_module, "BEAT_S", 0.01)
        monkeypatch.setattr(driver_module, "PROGRESS_S", 0.01)
        monkeypatch.setattr(driver_module, "LEAVE_S", 0.2)

    async def drive(self, entries: Sequence[Entry], **options: Any) -> Report:
        source = options.pop("source", None) or ListSource(entries, self.sink)
        made = BulkDriver(
            Client(),  # type: ignore[arg-type]
            source,
            self.sink,
            SPEC,
            run_id="aaaaaaaaaa",
            on_progress=self.progress.append,
            **options,
        )
        async with asyncio.timeout(60):
            return await made.run()

    @property
    def seqs(self) -> list[int]:
        return sorted(one.seq for one in self.sink.lines)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Driven:
    return Driven(monkeypatch)


def hold(item: Item) -> None:
    """Leaves an item waiting."""


async def test_every_item_gets_its_line_within_the_window(driven: Driven) -> None:
    report = await driven.drive([fed(n) for n in range(1000)], window=Window(50, 10**9))
    assert driven.seqs == list(range(1000))
    assert (report.state, report.succeeded, report.total) == ("complete", 1000, 1000)
    assert driven.run.most_in_redis <= 50
    assert driven.run.items == {}
    assert driven.run.total == 1000
    assert driven.progress[-1].settled == 1000


async def test_bytes_bound_the_window_and_one_large_item_goes_alone(
    driven: Driven,
) -> None:
    sizes = [90, 20, 5000, 20, 20, 20]
    entries = [fed(n, size=size) for n, size in enumerate(sizes)]
    await driven.drive(entries, window=Window(50, 100))
    assert driven.seqs == list(range(6))
    assert driven.run.most_in_redis <= 4


async def test_an_empty_source_is_complete_at_once(driven: Driven) -> None:
    report = await driven.drive([])
    assert (report.state, report.total, driven.run.total) == ("complete", 0, 0)


async def test_refused_lines_are_written_and_never_fed(driven: Driven) -> None:
    wrong = Refused(seq=1, error=JobError("invalid_request", "no"))
    report = await driven.drive([fed(0), wrong, fed(2)])
    assert driven.seqs == [0, 1, 2]
    assert (report.succeeded, report.refused, report.total) == (2, 1, 3)
    assert driven.run.num_fed == 2
    assert driven.run.total == 2


async def test_an_unwritten_outcome_is_not_acknowledged(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = driven.sink.write

    def refuse(_: object) -> None:
        raise BulkOutputFailed("full")

    monkeypatch.setattr(driven.sink, "write", refuse)
    with pytest.raises(BulkOutputFailed):
        await driven.drive([fed(0), fed(1)])
    assert len(driven.run.out) == 2
    monkeypatch.setattr(driven.sink, "write", write)
    await driven.drive([fed(0), fed(1)])
    assert driven.seqs == [0, 1]
    assert driven.run.out == []


async def test_what_was_written_and_not_acknowledged_is_written_once(
    driven: Driven,
) -> None:
    first, second = fed(0), fed(1)
    driven.run.items = {0: first.item, 1: second.item}
    driven.run.work()
    driven.sink.write([done(0)])  # and then the driver died
    await driven.drive([first, second, fed(2)])
    assert driven.seqs == [0, 1, 2]
    assert driven.run.items == {}


async def test_outcomes_wait_until_the_source_has_come_to_their_items(
    driven: Driven,
) -> None:
    entries = [fed(n) for n in range(300)]
    late = entries[250]
    driven.run.items = {250: late.item}
    driven.run.work()
    await driven.drive(entries, window=Window(10, 10**9))
    assert driven.seqs == list(range(300))


async def test_items_that_redis_forgot_are_fed_again(driven: Driven) -> None:
    driven.run.settle = hold
    driving = asyncio.create_task(driven.drive([fed(n) for n in range(5)]))
    await wait_until(lambda: driven.run.num_fed == 5)
    driven.run.items.clear()  # a crash took its last second
    driven.run.num_fed, driven.run.total = 0, None
    driven.run.settle = succeed
    report = await driving
    assert driven.seqs == list(range(5))
    assert report.forgotten == 5
    assert driven.run.total == 5


async def test_a_lost_acknowledgement_is_repeated(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [fed(n) for n in range(3)]
    acknowledge = driven.run.ack
    lost: list[int] = []

    async def lose(seqs: Sequence[int]) -> None:
        if lost or not seqs:
            await acknowledge(seqs)
        else:
            lost.extend(seqs)  # answered, and then rolled back by a crash

    monkeypatch.setattr(driven.run, "ack", lose)
    waiting = fed(3)
    driven.run.settle = lambda item: None if item.seq == 3 else succeed(item)
    driving = asyncio.create_task(driven.drive([*entries, waiting]))
    await wait_until(lambda: lost and driven.run.items.keys() == {3})
    driven.run.settle = succeed
    driven.run.work()
    await driving
    assert driven.seqs == [0, 1, 2, 3]
    assert driven.run.items == {}


async def test_a_cancelled_run_ends_without_lines_for_the_rest(driven: Driven) -> None:
    def settle(item: Item) -> Outcome | None:
        return succeed(item) if item.seq < 2 else None

    driven.run.settle = settle
    driving = asyncio.create_task(
        driven.drive([fed(n) for n in range(100)], window=Window(5, 10**9))
    )
    await wait_until(lambda: len(driven.sink.lines) == 2)
    driven.run.state = "cancelled"
    driven.run.settle = lambda item: msgspec.structs.replace(
        succeed(item), state="cancelled"
    )
    driven.run.work()
    report = await driving
    assert (report.state, report.succeeded, report.total) == ("cancelled", 2, None)
    assert driven.seqs == [0, 1]
    dropped = {outcome.seq for outcome in driven.sink.dropped}
    assert dropped == set(range(2, 2 + len(dropped)))
    driven.run.settle = succeed
    entries = [fed(n, generation=int(n in dropped)) for n in range(100)]
    again = await driven.drive(entries, reopen=True)
    assert (again.state, again.succeeded) == ("complete", 100)


async def test_a_job_cancelled_alone_is_a_failed_line(driven: Driven) -> None:
    driven.run.settle = lambda item: msgspec.structs.replace(
        succeed(item), state="cancelled" if item.seq == 1 else "succeeded"
    )
    report = await driven.drive([fed(0), fed(1)])
    assert (report.state, report.succeeded, report.failed) == ("complete", 1, 1)


async def test_a_cancelled_run_driven_again_keeps_what_had_ended(
    driven: Driven,
) -> None:
    """As when a gateway is started again while a batch is being cancelled."""
    entries = [fed(n) for n in range(4)]
    driven.run.items = {n: entries[n].item for n in range(2)}
    driven.run.settle = lambda item: msgspec.structs.replace(
        succeed(item), state="cancelled" if item.seq == 1 else "succeeded"
    )
    driven.run.work()
    driven.run.state = "cancelled"
    report = await driven.drive(entries)
    assert report.state == "cancelled"
    assert driven.seqs == [0]
    assert driven.run.items == {}


async def test_a_source_that_breaks_off_is_worked_off_first(driven: Driven) -> None:
    class Broken(ListSource):
        def entries(self) -> Any:
            yield from super().entries()
            raise InputUnreadable("file", "ends in mid-stream")

    source = Broken([fed(n) for n in range(3)], driven.sink)
    with pytest.raises(InputUnreadable):
        await driven.drive([], source=source)
    assert driven.seqs == [0, 1, 2]
    assert driven.run.total is None


async def test_an_outage_is_shown(driven: Driven) -> None:
    driven.run.settle = hold
    driving = asyncio.create_task(driven.drive([fed(0)]))
    driven.run.away_s = 3.0
    await wait_until(
        lambda: any("not answered for 3 s" in (p.note or "") for p in driven.progress)
    )
    driven.run.away_s = None
    driven.run.settle = succeed
    driven.run.work()
    await driving


async def test_an_item_whose_earlier_try_settles_late_is_fed_again(
    driven: Driven,
) -> None:
    earlier = msgspec.structs.replace(succeed(fed(0).item), state="failed")

    def first_the_earlier(item: Item) -> Outcome:
        return earlier if driven.run.num_fed == 1 else succeed(item)

    feed = driven.run._feed

    def replacing(item: Item) -> FeedStatus:
        settled = [row for row in driven.run.out if row[1].seq == item.seq]
        if any(row[1].generation < item.generation for row in settled):
            driven.run.out.remove(settled[0])
            driven.run.items.pop(item.seq)
        return feed(item)

    driven.run.settle = first_the_earlier
    driven.run._feed = replacing  # type: ignore[method-assign]
    report = await driven.drive([fed(0, generation=1)])
    assert (report.succeeded, report.failed) == (1, 0)


async def test_what_is_acknowledged_while_the_rest_is_fed_again_is_not_fed(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "BATCH", 50)
    driven.run.settle = hold
    driving = asyncio.create_task(driven.drive([fed(n) for n in range(200)]))
    await wait_until(lambda: driven.run.num_fed == 200 and driven.run.total == 200)
    feed = driven.run.feed

    async def slowly(items: Sequence[Item]) -> list[FeedStatus]:
        driven.run.settle = succeed
        driven.run.work()
        await wait_until(lambda: len(driven.sink.lines) == 200)
        await loop_turns(20)
        return await feed(items)

    driven.run.feed = slowly  # type: ignore[method-assign]
    driven.run.losses += 1
    await driving
    assert driven.seqs == list(range(200))
    assert driven.run.num_fed == 200


async def test_the_pool_learns_of_refused_lines_and_of_the_end(driven: Driven) -> None:
    wrong = Refused(seq=1, error=JobError("invalid_request", "no"))
    await driven.drive([fed(0), wrong])
    assert (driven.run.refused, driven.run.has_left) == (1, True)
    driven.run.has_left, driven.run.settle = False, hold
    driving = asyncio.create_task(driven.drive([fed(2)]))
    await wait_until(lambda: driven.run.num_fed == 2)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    assert driven.run.has_left
