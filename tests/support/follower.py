"""A subscriber that keeps all it sees, and what it must have seen."""

import asyncio
from collections import defaultdict
from typing import Any

from tokenmill import Delta

from .waiting import wait_until


class Follower:
    """One job, followed to its end by a task.

    Args:
        job: Of a client.
    """

    def __init__(self, job: Any) -> None:
        self.job = job
        self.deltas: list[Delta] = []
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for delta in self.job.stream():
            self.deltas.append(delta)

    @property
    def num_tokens(self) -> int:
        """Tokens of the first choice so far."""
        return sum(len(delta.token_ids) for delta in self.deltas if not delta.choice)

    async def has_tokens(self, count: int, timeout_s: float = 30) -> None:
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
        return result
