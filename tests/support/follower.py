"""A subscriber that keeps all it sees, and what it must have seen."""

import asyncio
import time
from collections import defaultdict
from typing import Any

from tokenmill import Delta

from .waiting import wait_until


class Follower:
    """One job, followed to its end by a task.

    Args:
        job: Of a client; followed from here on.
        text: What its output must be, where that is known, as of the echo engine.
    """

    def __init__(self, job: Any, text: str = "") -> None:
        self.job = job
        self.text = text
        self.submitted = time.monotonic()
        self.deltas: list[Delta] = []
        self.times: list[float] = []
        """`time.monotonic()` of each delta."""
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for delta in self.job.stream():
            self.deltas.append(delta)
            self.times.append(time.monotonic())

    @property
    def begun(self) -> bool:
        return len(self.deltas) >= 3

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.submitted

    def next_after(self, moment: float) -> float:
        """Seconds from a moment to the next delta."""
        return min(at for at in self.times if at > moment) - moment

    @property
    def num_tokens(self) -> int:
        """Tokens of the first choice so far."""
        return sum(len(delta.token_ids) for delta in self.deltas if not delta.choice)

    async def has_tokens(self, count: int, timeout_s: float = 60) -> None:
        """Waits until that many tokens of the first choice are out."""
        await wait_until(
            lambda: self.task.done() or self.num_tokens >= count,
            timeout_s=timeout_s,
            every_s=0.002,
            what=f"token {count} of {self.job.id}",
        )
        assert not self.task.done(), "the stream ended too early"

    async def ended(self, timeout_s: float = 60) -> Any:
        """Waits for the end; returns the result, checked against what was seen."""
        await asyncio.wait_for(asyncio.shield(self.task), timeout_s)
        result = await self.job.result(timeout=10)
        self._compare(result)
        return result

    def check(self) -> None:
        """No gap, no repeat, the right text; of the echo engine, at the end."""
        offset = 0
        for delta in self.deltas:
            assert delta.offset == offset, (self.job.id, delta.offset, offset)
            offset += len(delta.token_ids)
        assert "".join(delta.text for delta in self.deltas) == self.text
        assert offset == len(self.text.encode())

    def _compare(self, result: Any) -> None:
        ids, texts, logprobs = (defaultdict(list) for _ in range(3))
        for delta in self.deltas:
            assert delta.offset == len(ids[delta.choice]), "a gap, or a token twice"
            ids[delta.choice] += delta.token_ids
            texts[delta.choice].append(delta.text)
            logprobs[delta.choice] += delta.logprobs or ()
        for choice in result.choices:
            assert tuple(ids[choice.index]) == choice.token_ids
            assert "".join(texts[choice.index]) == choice.text
            assert tuple(logprobs[choice.index]) == (choice.logprobs or ())
