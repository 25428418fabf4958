"""A stream's watcher never waits for a client, and asks again who that is."""

import asyncio
from types import SimpleNamespace

import pytest
from support.waiting import PATIENCE_S

from tokenmill.producer.gateway import leaving
from tokenmill.producer.gateway.sse import ENDED, EventStream, event
from tokenmill.shared.config import GatewayConfig
from tokenmill.shared.errors import RedisUnavailable


class Stream:
    """One stream with one event and no news after it, to a client of the test."""

    def __init__(self, limit_s: float | None = None, **settings: float) -> None:
        self.owner = SimpleNamespace(
            config=SimpleNamespace(gateway=GatewayConfig(**settings)),
            leaving=asyncio.Event(),
            draining=asyncio.Event(),
        )
        self.limit_s = limit_s
        self.scope: dict[str, object] = {}
        self.sent: list[dict[str, object]] = []
        self.takes = 1_000_000
        """Messages that the client takes before its buffers are full."""
        self.hangs = asyncio.Event()
        """Set once something is sent that the client does not take."""
        self.is_closed = False

    async def _source(self):
        try:
            yield event(b"{}")
            await asyncio.Event().wait()
        finally:
            self.is_closed = True

    async def _send(self, message) -> None:
        if len(self.sent) >= self.takes:
            self.hangs.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    async def _receive(self):
        return await asyncio.Event().wait()

    async def run(self) -> object:
        stream = EventStream(self.owner, self._source(), limit_s=self.limit_s)
        async with asyncio.timeout(PATIENCE_S):
            await stream(self.scope, self._receive, self._send)
        assert self.is_closed
        return self.scope[ENDED]


async def test_a_client_that_takes_no_heartbeat_is_cut_off() -> None:
    stream = Stream(keepalive_s=0.1, slow_client_s=0.2)
    stream.takes = 2  # the head and the event
    assert await stream.run() == "slow_client"


async def test_a_heartbeat_that_hangs_holds_up_neither_end_nor_time() -> None:
    for how in ("shutting_down", "timeout"):
        stream = Stream(keepalive_s=0.1, slow_client_s=60, request_timeout_s=1)
        stream.takes = 2
        running = asyncio.create_task(stream.run())
        if how == "shutting_down":
            await stream.hangs.wait()
            stream.owner.leaving.set()
        assert await running == how
        assert len(stream.sent) == 2


async def test_a_stream_ends_with_what_let_its_caller_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaving, "LOOK_AGAIN_S", 0.01)
    for limit_s, last in ((None, b"invalid_api_key"), (0.0, b"")):
        stream = Stream(limit_s)
        answers = iter((True, RedisUnavailable("away"), True, False))

        async def is_allowed(answers=answers) -> bool:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        stream.scope[leaving.STILL_ALLOWED] = is_allowed
        assert await stream.run() == "refused"
        assert last in stream.sent[-1]["body"]
        assert stream.sent[-1]["more_body"] is False
        assert next(answers, "none") == "none"
