"""Jobs of many callers go in few calls, and a close leaves no caller waiting."""

import asyncio
import datetime as dt
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import PATIENCE_S, loop_turns

from tokenmill.producer.grouping import Grouping
from tokenmill.producer.prepare import new_job
from tokenmill.producer.submit import Submission, _invalid
from tokenmill.shared.errors import (
    InvalidRequest,
    PayloadTooLarge,
    RedisUnavailable,
    TokenmillError,
)
from tokenmill.shared.messages import PoolCard, Prompt
from tokenmill.shared.script_types import EnqueueReply


class Session:
    """Redis behind a door that stays shut until it is opened."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.opened = asyncio.Event()

    def scripts_of(self, job_id: object) -> object:
        return SimpleNamespace(enqueue=self.enqueue)

    async def patiently(self, call: Any) -> Any:
        return await call()

    async def enqueue(self, jobs: Any) -> list[EnqueueReply]:
        self.calls.append(len(jobs))
        await self.opened.wait()
        return [EnqueueReply(status="queued", job_id=str(job.id)) for job in jobs]


def grouping(session: Session) -> Grouping:
    return Grouping(cast("Any", session))


def job(text: str = "x") -> Any:
    return new_job(Prompt(text, model="m"), None, PoolCard())


@pytest.mark.parametrize("turns", range(4))
async def test_a_close_fails_every_caller_whatever_its_call_had_begun(turns) -> None:
    made = grouping(Session())
    callers = [asyncio.create_task(made.enqueue(job())) for _ in range(3)]
    await loop_turns(turns)
    if not turns:
        for caller in callers:
            caller.cancel()
    await made.close()
    async with asyncio.timeout(PATIENCE_S):
        ended = await asyncio.gather(*callers, return_exceptions=True)
    kind = TokenmillError if turns else asyncio.CancelledError
    assert {type(error) for error in ended} == {kind}
    assert len({id(error) for error in ended}) == 3


async def test_a_call_has_a_megabyte_at_most() -> None:
    session = Session()
    session.opened.set()
    made = grouping(session)
    jobs = [job("x" * 400_000) for _ in range(5)]
    replies = await asyncio.gather(*(made.enqueue(one) for one in jobs))
    assert [reply.job_id for reply in replies] == [str(one.id) for one in jobs]
    assert session.calls == [2, 2, 1]


def test_the_hash_of_a_request_is_the_same_whichever_way_it_goes() -> None:
    stored = PoolCard(
        storage_url="file:///store", offload_bytes=100, max_input_bytes=10_000
    )
    prompt = Prompt("y" * 500, model="m", not_before=dt.datetime.now(dt.UTC))
    by_store, by_redis = (new_job(prompt, None, card) for card in (stored, PoolCard()))
    assert by_store.upload is not None
    assert by_store.payload != by_redis.payload
    assert by_store.payload_hash == by_redis.payload_hash


@pytest.mark.parametrize(
    ("detail", "kind", "field"),
    [
        ("payload: has 9 bytes; expected at most 5", PayloadTooLarge, "payload"),
        ("tenant: expected 1 to 64 letters", InvalidRequest, "tenant"),
        ("strange", InvalidRequest, "enqueue"),
    ],
)
def test_what_enqueue_finds_wrong_names_its_field(detail, kind, field) -> None:
    error = _invalid(detail)
    assert (type(error), error.field) == (kind, field)


async def test_what_was_under_way_when_a_call_failed_is_told(monkeypatch) -> None:
    """The second call is recorded after the first has failed."""
    failed = asyncio.Event()

    async def send(batch: Any) -> list[EnqueueReply]:
        jobs = [one for _, one in batch]
        if jobs[0] is made[0]:
            failed.set()
            raise RedisUnavailable("gone")
        await failed.wait()
        await loop_turns()
        return [EnqueueReply(status="queued", job_id=str(one.id)) for one in jobs]

    made = [job() for _ in range(400)]
    submission = Submission(cast("Any", None), PoolCard(), "raise")
    monkeypatch.setattr(submission, "_send", send)
    with pytest.raises(RedisUnavailable) as caught:
        await submission.enqueue(made)
    assert list(caught.value.enqueued) == [str(one.id) for one in made[200:]]
