"""Fetching inputs by reference: nobody waits for another tenant's, or for a store."""

import asyncio
from collections import Counter

from support.waiting import wait_until

from tokenmill.scheduler.entries import Entry
from tokenmill.scheduler.large_inputs import FETCHES, LargeInputs
from tokenmill.scheduler.tokenizing import RawJob
from tokenmill.shared.config import Config
from tokenmill.shared.errors import StorageUnavailable
from tokenmill.shared.messages import InputRef, JobClass

REF = InputRef(name="a/b", size=1, sha256="0" * 64)


class Store:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.away = False
        self.asked: list[str] = []

    async def read(self, ref: InputRef, tenant: str) -> bytes:
        self.asked.append(tenant)
        await self.open.wait()
        if self.away:
            raise StorageUnavailable("away")
        return b"x"

    def close(self) -> None:
        pass


class Fetching:
    """Inputs of one class on a store of the test."""

    def __init__(self) -> None:
        self.store = Store()
        self.unfetched: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.got: list[str] = []
        self.inputs = LargeInputs(
            Config(), self._take, self._refuse, self._waiting, self.unfetched
        )
        self.inputs._store = self.store  # type: ignore[assignment]

    async def _take(self, entry: Entry, raw: RawJob, card: object) -> None:
        self.got.append(entry.job_id)

    async def _refuse(self, entry: Entry, error: Exception) -> None:
        raise AssertionError(error)

    async def _waiting(self, job_ids: list[str]) -> set[str]:
        return set(job_ids) - self.ended

    def start(self, name: str, tenant: str) -> None:
        entry = Entry(
            job_id=name,
            stream=f"lane-{tenant}",
            entry_id="1-0",
            job_class=JobClass.INTERACTIVE,
            priority=0,
            tenant=tenant,
            deadline_ms=None,
            num_bytes=1,
            enqueued_ms=0,
            resumed=False,
        )
        self.inputs.start(entry, RawJob(b"{}", None), REF, None)  # type: ignore[arg-type]


async def test_thousands_of_inputs_hold_up_nobody_and_tenants_take_turns() -> None:
    fetching = Fetching()
    for i in range(3000):
        fetching.start(f"a{i}", "a")
    fetching.start("b0", "b")
    assert fetching.unfetched == {"lane-a": 3000, "lane-b": 1}
    fetching.store.open.set()
    await wait_until(lambda: len(fetching.got) == 3001)
    assert fetching.got.index("b0") <= FETCHES
    assert not fetching.unfetched
    fetching.inputs.check()
    await fetching.inputs.close()


async def test_jobs_that_ended_are_dropped_while_the_store_is_away() -> None:
    fetching = Fetching()
    fetching.store.away = True
    for i in range(50):
        fetching.start(f"a{i}", "a")
    fetching.ended = {f"a{i}" for i in range(49)}
    fetching.store.open.set()
    await wait_until(lambda: fetching.unfetched == {"lane-a": 1})
    fetching.store.away = False
    await wait_until(lambda: fetching.got == ["a49"])
    await fetching.inputs.close()
