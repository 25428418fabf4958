"""Answers to clients that are about to register an adapter: can it be served here?"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.adapter_keys import check_key, verdict_key
from ..shared.adapters import AdapterCheck, AdapterVerdict
from ..shared.errors import TokenmillError
from ..shared.messages import encode
from ..shared.outage import REDIS_ERRORS, Outage
from ..shared.tasks import end_tasks
from .adapters_loader import AdapterLoader, off_loop, too_slow

VERDICT_MS: Final = 120_000
"""How long a verdict waits to be read."""
_MOST: Final = 8
"""Checks at a time; more are not begun, and asked for again by those who wait."""


class AdapterChecks:
    """Reads checkpoints on request and says what is wrong with them.

    Args:
        client: Redis.
        loader: Reads them.
        base: Version of the worker's weights.
        limit_s: Longest that the files of one may take to come.
        outage: Shared state of the connection.
    """

    def __init__(
        self,
        *,
        client: "redis.asyncio.Redis",
        loader: AdapterLoader,
        base: str,
        limit_s: float,
        outage: Outage,
    ) -> None:
        self._client = client
        self._loader = loader
        self._base = base
        self._limit_s = limit_s
        self._outage = outage
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = structlog.get_logger()

    def ask(self, check_id: str) -> None:
        """Begins a check, unless it is under way: who asks does so again and again.

        Args:
            check_id: Names the request and the answer in Redis.
        """
        if check_id in self._tasks or len(self._tasks) >= _MOST:
            return
        task = asyncio.create_task(self._answer(check_id), name="adapter-check")
        self._tasks[check_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(check_id, None))

    async def close(self) -> None:
        """Ends what is under way; whoever waits asks another worker."""
        await end_tasks(*self._tasks.values())

    async def _answer(self, check_id: str) -> None:
        answer = verdict_key(check_id)
        try:
            raw, there = await asyncio.gather(
                self._client.get(check_key(check_id)), self._client.exists(answer)
            )
            if raw is None or there:
                return
            verdict = await self._verdict(raw)
            await self._client.set(answer, encode(verdict), px=VERDICT_MS, nx=True)
        except REDIS_ERRORS as error:
            self._outage.failed("adapter_check", error)

    async def _verdict(self, raw: bytes) -> AdapterVerdict:
        try:
            path = Path(msgspec.json.decode(raw, type=AdapterCheck).path)
        except msgspec.DecodeError as error:
            return AdapterVerdict(problem=f"the request cannot be read: {error}")
        try:
            async with asyncio.timeout(self._limit_s):
                facts = await off_loop(partial(self._loader.check, path))
        except TimeoutError:
            return self._problem(str(too_slow(self._limit_s)))
        except TokenmillError as error:
            return self._problem(str(error))
        except Exception as error:  # noqa: BLE001 - told to who asked, and logged
            self._log.exception("adapter_check_failed", path=str(path))
            return self._problem(f"{type(error).__name__}: {error}")
        return AdapterVerdict(
            base=self._base,
            digest=facts.digest,
            rank=facts.rank,
            alpha=facts.alpha,
            targets=tuple(facts.targets),
            bytes=facts.bytes,
            notes=facts.notes,
        )

    def _problem(self, text: str) -> AdapterVerdict:
        return AdapterVerdict(problem=text, base=self._base)
