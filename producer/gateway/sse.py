"""Server-sent events: ids, comments that keep a stream alive, clients that leave.

A stream ends when its events do, when the client leaves, when it takes nothing for too
long, when its time is up, when what let the client in is revoked, or when the gateway
has to go. In every case the source of
its events is closed before the response returns, so that a job can be cancelled. The
response begins with the first event, so that what fails before has a status of its own.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Final

import structlog
from starlette.responses import Response

from ...shared.errors import TokenmillError
from ...shared.tasks import end_tasks
from .errors import RETRY_S, ApiError, as_api_error, respond, retry_after
from .leaving import STILL_ALLOWED, until_left, until_refused

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from .context import Gateway

DONE_WORD: Final = "[DONE]"
DONE: Final = f"data: {DONE_WORD}\n\n".encode()
"""Ends a stream of OpenAI's form."""
COMMENT: Final = b": keep-alive\n\n"
ENDED: Final = "tokenmill.ended"
"""Name in the request's scope of how its stream ended, for the log."""
BOUNDED: Final = "tokenmill.bounded"
"""Set in the scope of a response that sees to slow clients itself."""
UNEXPECTED: Final = ApiError(
    500,
    "an unexpected error, which is a bug in tokenmill; the gateway's log has it under "
    "this answer's X-Request-Id",
    code="internal_error",
)
_LAST_WORD_S: Final = 2.0
_SHORTEST_S: Final = 0.02
"""Between two looks at a stream whose next moment is due already."""
_log = structlog.get_logger(__name__)

Source = AsyncGenerator[bytes, None]
"""Yields whole events, as `event` makes them."""


def event(data: bytes, *, id: str | None = None, kind: str | None = None) -> bytes:  # noqa: A002
    """Returns one event.

    Args:
        data: JSON without line breaks.
        id: What a client sends as `Last-Event-ID` when it comes back.
        kind: Name of the event; None is the unnamed kind.
    """
    head = b""
    if id is not None:
        head += b"id: " + id.encode() + b"\n"
    if kind is not None:
        head += b"event: " + kind.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Returns the event that ends a stream with an error, as OpenAI does it."""
    return event(error.body)


def going_down() -> ApiError:
    """Returns the error of a request that the gateway's end cuts off."""
    return ApiError(
        503,
        "the gateway is going down; send the request again",
        code="shutting_down",
        headers=retry_after(RETRY_S),
    )


def too_slow(seconds: float) -> ApiError:
    """Returns the error of a request that took longer than it may."""
    return ApiError(
        504,
        f"the request was not done after {seconds:g} s (gateway.request_timeout_s); "
        "send long work to /v1/jobs or /v1/batches",
        code="request_timeout",
    )


def no_longer_allowed() -> ApiError:
    """Returns the error of a stream whose caller has lost its key or session."""
    return ApiError(
        401,
        "the API key, or the session, with which this stream was begun is no longer "
        "good; use another key, or log in again",
        code="invalid_api_key",
    )


class EventStream(Response):
    """A response of events.

    Args:
        owner: The gateway; its settings bound the stream.
        source: The events. It is closed, wherever it stands, when the stream ends.
        headers: Headers of the response.
        limit_s: Longest duration; None takes `gateway.request_timeout_s`. 0 is a
            stream without end, which a client takes up again anywhere: it ends without
            a word as soon as the gateway is to go.
        heartbeat: Sent while there is no news; None is a comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        owner: "Gateway",
        source: Source,
        headers: Mapping[str, str] | None = None,
        *,
        limit_s: float | None = None,
        heartbeat: bytes = COMMENT,
    ) -> None:
        settings = owner.config.gateway
        self._owner = owner
        self._source = source
        self._heartbeat = heartbeat
        self._keepalive_s = settings.keepalive_s
        self._slow_s = settings.slow_client_s
        self._limit_s = settings.request_timeout_s if limit_s is None else limit_s
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(
            {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]
        self._turn = asyncio.Lock()
        """Held while something is sent: events and heartbeats come one by one."""
        self._started = False

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Sends the events."""
        scope[BOUNDED] = True
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        pump = asyncio.create_task(self._pump())
        left = asyncio.create_task(until_left(receive))
        told = self._owner.leaving if self._limit_s else self._owner.draining
        leaving = asyncio.create_task(told.wait())
        refused = asyncio.create_task(until_refused(scope.get(STILL_ALLOWED)))
        self._heartbeats: set[asyncio.Task[None]] = set()
        ended = "failed"
        try:
            ended = await self._watch(pump, left, leaving, refused)
        finally:
            scope[ENDED] = ended
            tasks = (pump, left, leaving, refused, *self._heartbeats)
            await end_tasks(*tasks)
            await self._source.aclose()

    async def _watch(
        self,
        pump: "asyncio.Task[None]",
        left: "asyncio.Task[None]",
        leaving: "asyncio.Task[bool]",
        refused: "asyncio.Task[None]",
    ) -> str:
        """Lets the pump run and steps in where it must end or has nothing to send."""
        end = self._loop.time() + self._limit_s if self._limit_s else math.inf
        while True:
            patience_s = self._slow_s if self._is_sending else self._keepalive_s
            due = min(end, self._moved_at + patience_s)
            wait_s = min(due - self._loop.time(), self._slow_s)
            await asyncio.wait(
                (pump, left, leaving, refused, *self._heartbeats),
                timeout=max(wait_s, _SHORTEST_S),
                return_when=asyncio.FIRST_COMPLETED,
            )
            now = self._loop.time()
            if pump.done():
                return "client_left" if _lost_its_client(pump) else "done"
            if left.done() or self._heartbeat_failed():
                return "client_left"
            if leaving.done():
                return await self._break_off(pump, going_down(), "shutting_down")
            if refused.done():
                return await self._break_off(pump, no_longer_allowed(), "refused")
            if now >= end:
                return await self._break_off(pump, too_slow(self._limit_s), "timeout")
            if self._is_sending and now >= self._moved_at + self._slow_s:
                return "slow_client"
            if not self._is_sending and now >= self._moved_at + self._keepalive_s:
                # Not waited for here: it may hang, and the rest is to be seen to.
                beat = asyncio.create_task(self._pass_on(self._heartbeat))
                self._heartbeats.add(beat)

    @property
    def _is_sending(self) -> bool:
        return self._turn.locked() or bool(self._heartbeats)

    def _heartbeat_failed(self) -> bool:
        """Forgets heartbeats that are sent; whether one met with a lost client."""
        sent = {beat for beat in self._heartbeats if beat.done()}
        self._heartbeats -= sent
        return any(isinstance(beat.exception(), OSError) for beat in sent)

    async def _pump(self) -> None:
        try:
            async for data in self._source:
                await self._pass_on(data)
        except (ApiError, TokenmillError) as error:
            told = error if isinstance(error, ApiError) else as_api_error(error)
            await self._fail(told)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - the client is told, the log has the rest
            _log.exception("stream_failed")
            await self._fail(UNEXPECTED)
        else:
            await self._pass_on(b"", more=False)

    async def _break_off(
        self, pump: "asyncio.Task[None]", error: ApiError, why: str
    ) -> str:
        """Ends the stream with an error, unless the client takes nothing anyway."""
        was_sending = self._is_sending
        tasks = (pump, *self._heartbeats)
        await end_tasks(*tasks)
        if not was_sending:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    if self._limit_s:
                        await self._fail(error)
                    else:
                        await self._pass_on(b"", more=False)
        return why

    async def _fail(self, error: ApiError) -> None:
        """Ends with an error: one that comes before anything else has a status."""
        if self._started:
            await self._pass_on(error_event(error), more=False)
            return
        response = respond(error)
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        await self._pass_on(response.body, more=False)

    async def _pass_on(self, data: bytes | memoryview, *, more: bool = True) -> None:
        # The server holds `send` back while the client's buffers are full.
        async with self._turn:
            self._moved_at = self._loop.time()
            try:
                if not self._started:
                    self._started = True
                    await self._send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": more}
                )
            finally:
                self._moved_at = self._loop.time()


def _lost_its_client(pump: "asyncio.Task[None]") -> bool:
    return isinstance(pump.exception(), OSError)
