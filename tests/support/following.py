"""A stream followed by a task, with the time of every delta, and checked at its end."""

import asyncio
import time

from tokenmill import Delta, Job


class Followed:
    """One job of the echo engine.

    Args:
        job: Followed from here on.
        text: What its prompt was, and so its output must be.
    """

    def __init__(self, job: Job, text: str) -> None:
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

    def check(self) -> None:
        """No gap, no repeat, the right text."""
        offset = 0
        for delta in self.deltas:
            assert delta.offset == offset, (self.job.id, delta.offset, offset)
            offset += len(delta.token_ids)
        assert "".join(delta.text for delta in self.deltas) == self.text
        assert offset == len(self.text.encode())
