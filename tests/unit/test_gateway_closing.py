"""A stream that is left closes all it is made of, before memory is ever tidied."""

import asyncio
from types import SimpleNamespace

import pytest

from tokenmill.producer.gateway import openai_calls
from tokenmill.producer.gateway.running import Running


class Stream:
    """The stream of one job: one delta, then silence."""

    def __init__(self) -> None:
        self.end = None
        self.is_closed = False
        self._deltas = iter([object()])

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self.is_closed = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        for delta in self._deltas:
            return delta
        return await asyncio.Event().wait()


class Job:
    """A job that goes on."""

    id = "m.0.0123456789abcdef"
    outcome = None

    def __init__(self) -> None:
        self.following = Stream()
        self.num_cancelled = 0

    def stream(self, **_positions: object) -> Stream:
        return self.following

    async def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_closes_streams_and_cancels_jobs_at_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job() for _ in range(count)]
    running = Running(None, jobs, keep=False, version=None, spell=None)
    writer = SimpleNamespace(of=lambda *_: [{"a": 1}])
    monkeypatch.setattr(openai_calls, "writer_of", lambda *_: writer)
    body = SimpleNamespace(n=1, wants_usage=False)
    events = openai_calls.events_of(running, body)
    await anext(events)
    await events.aclose()
    # No turn of the loop has passed since, in which a collector could have done it.
    assert [job.following.is_closed for job in jobs] == [True] * count
    assert [job.num_cancelled for job in jobs] == [1] * count
