"""One attempt to deliver a webhook, and when the next is due.

The record of a delivery is written before its first attempt, and an attempt is counted
before it is made: whoever dies in between leaves something to go on from, so that
nothing is delivered less than once.
"""

import email.utils
import random
import ssl
import time
from typing import Final

import httpcore
import httpx
import msgspec
import redis.asyncio
import structlog

from ..shared.config import WebhooksConfig
from ..shared.metrics.catalog import WEBHOOKS
from ..shared.script_runner import count_of
from ..shared.webhook_signing import sign
from ..shared.webhook_target import shown_target, url_problem
from .webhook_events import body_of, output_of
from .webhook_records import SETTLED, Record, Records
from .webhook_transport import Poster, TargetRefused
from .webhook_turns import Turns

FIRST_WAIT_S: Final = 5.0
WAIT_FACTOR: Final = 4.0
LONGEST_WAIT_S: Final = 6 * 3600.0
"""Waits are drawn from the upper half of 5 s, 20 s, 80 s, 5, 21 and 85 min, 6 h."""
_RETRIED: Final = frozenset({408, 425, 429})
_NO_ANSWER: Final = (
    *(TimeoutError, OSError, httpx.TransportError),
    *(httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError),
)
_log = structlog.get_logger(__name__)


class _Outcome(msgspec.Struct, frozen=True):
    state: str
    """`delivered`, `given_up` or `pending`."""
    status: int | None = None
    error: str = ""
    wait_s: float = 0.0
    """What the receiver asked for."""


class Deliverer:
    """Delivers webhooks.

    Args:
        client: Redis.
        config: Settings of webhooks.
        poster: Sends them.
        turns: Places of hosts; None: of this deliverer alone.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        config: WebhooksConfig,
        poster: Poster,
        turns: Turns | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._poster = poster
        self._records = Records(client)
        self._turns = Turns() if turns is None else turns
        for outcome in ("delivered", "retried", "given_up"):
            WEBHOOKS.add(outcome, by=0)  # one that first shows at 1 has not risen

    async def attempt(self, event_id: str) -> float | None:
        """Makes one attempt.

        Args:
            event_id: Of the event.

        Returns:
            Seconds to wait for the next; None when the delivery is settled.
        """
        record = await self._records.read(event_id)
        if record is None:
            return None
        if record.get("state") in SETTLED:
            await self._records.settle(event_id)
            return None
        target = shown_target(record.get("url", ""))
        wait_s = self._turns.wait_s(target)
        if wait_s is not None:
            return wait_s
        with self._turns.place(target):
            return await self._attempt(event_id, record)

    async def _attempt(self, event_id: str, record: Record) -> float | None:
        url, made = record.get("url", ""), count_of(record.get("attempts", ""))
        refusal = self._refusal(url)
        if refusal is not None:
            outcome = _Outcome("given_up", None, refusal)
        elif made >= self._config.max_attempts:
            # The janitor ended in the midst of the last one.
            status = count_of(record.get("status", "")) or None
            error = record.get("error") or "the last attempt was cut off"
            outcome = _Outcome("given_up", status, error)
        else:
            made += 1
            await self._records.count_attempt(event_id, made)
            outcome = await self._send(event_id, url, record)
        if outcome.state == "pending" and made >= self._config.max_attempts:
            outcome = msgspec.structs.replace(outcome, state="given_up")
        return await self._note(event_id, url, made, outcome)

    def _refusal(self, url: str) -> str | None:
        """Why nothing is sent there: a client of others' may have checked nothing."""
        if self._config.secret is None:
            return "the pool has no webhooks.secret to sign it with"
        problem = url_problem(url, allow_private=self._config.allow_private)
        return None if problem is None else f"its address {problem}"

    async def _send(self, event_id: str, url: str, record: Record) -> _Outcome:
        at_ms, data = count_of(record.get("at_ms", "")), record["data"].encode()
        more = await output_of(self._client, event_id)
        body = body_of(record.get("type", ""), at_ms, data, more)
        config = self._config
        secrets = [s for s in (config.secret, config.previous_secret) if s is not None]
        headers = {
            "content-type": "application/json",
            "user-agent": "tokenmill-webhooks",
            **sign(secrets, event_id, int(time.time()), body),
        }
        try:
            answer = await self._poster.post(url, headers, body)
        except TargetRefused as error:
            return _Outcome("given_up", None, str(error))
        except httpx.InvalidURL:
            return _Outcome("given_up", None, "its address cannot be called")
        except _NO_ANSWER as error:
            return _Outcome("pending", None, why(error, config.timeout_s))
        return _judged(answer.status, answer.retry_after)

    async def _note(
        self, event_id: str, url: str, made: int, outcome: _Outcome
    ) -> float | None:
        wait_s = None
        if outcome.state == "pending":
            wait_s = max(wait_after(made), outcome.wait_s)
        fields = {
            "state": outcome.state,
            "attempts": str(made),
            "status": str(outcome.status or ""),
            "error": outcome.error,
        }
        await self._records.write(event_id, fields, wait_s)
        told = {"event_id": event_id, "target": shown_target(url), "attempts": made}
        told |= {"status": outcome.status} if outcome.status else {}
        WEBHOOKS.add("retried" if outcome.state == "pending" else outcome.state)
        if outcome.state == "delivered":
            _log.info("webhook_delivered", **told)
        elif wait_s is None:
            _log.warning("webhook_given_up", **told, error=outcome.error)
        else:
            told |= {"error": outcome.error, "retry_in_s": round(wait_s)}
            _log.info("webhook_failed", **told)
        return wait_s


def _judged(status: int, retry_after: str | None) -> _Outcome:
    if 200 <= status < 300:
        return _Outcome("delivered", status)
    if status in _RETRIED or status >= 500:
        wait_s = retry_after_s(retry_after) or 0.0
        return _Outcome("pending", status, f"answered {status}", wait_s)
    moved = "; redirects are not followed" if 300 <= status < 400 else ""
    return _Outcome("given_up", status, f"answered {status}{moved}")


def wait_after(made: int) -> float:
    """Returns the seconds to wait after so many attempts, with jitter."""
    bound = min(FIRST_WAIT_S * WAIT_FACTOR ** (made - 1), LONGEST_WAIT_S)
    return random.uniform(bound / 2, bound)  # noqa: S311 - no secret


def retry_after_s(value: str | None, now_s: float | None = None) -> float | None:
    """Reads the header Retry-After: seconds, or a date.

    Args:
        value: Of the header.
        now_s: Seconds since 1970; None asks the clock.

    Returns:
        Seconds, `LONGEST_WAIT_S` at most; None where it says nothing that can be read.
    """
    if value is None:
        return None
    words = value.strip()
    if words.isascii() and words.isdigit() and len(words) <= 9:
        return min(float(words), LONGEST_WAIT_S)
    try:
        until = email.utils.parsedate_to_datetime(words).timestamp()
    except (ValueError, OverflowError):
        return None
    left = until - (time.time() if now_s is None else now_s)
    return min(max(left, 0.0), LONGEST_WAIT_S)


def why(error: BaseException, timeout_s: float) -> str:
    """Says why there was no answer, in words that hold nothing of the address.

    Args:
        error: What the attempt raised.
        timeout_s: How long it might take.
    """
    if isinstance(error, TimeoutError | httpcore.TimeoutException):
        return f"no answer within {timeout_s:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {cause.reason}"
        if isinstance(cause, ConnectionRefusedError):
            return "it refuses connections"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpcore.ProtocolError):
        return "what answers there does not speak HTTP"
    words = str(error)
    return (
        words if words.startswith("its ") else f"no connection ({type(error).__name__})"
    )
