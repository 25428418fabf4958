"""A client of bench/soak.py.

    soak_client.py URL SECONDS RATE SEED

Submits at a rate, or 300 at a time where it is 0, for some seconds. Of each hundred
jobs forty are streamed, fifty read by `result`, five cancelled while they run, five
given a deadline that they cannot meet. At the end it prints one JSON object.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter

from tokenmill import Client, Prompt, Sampling
from tokenmill.producer.job import Job
from tokenmill.shared.errors import JobCancelled, JobExpired
from tokenmill.shared.messages import JobClass

AT_ONCE = 300
"""Jobs in flight while the capacity is sought."""
MOST_IN_FLIGHT = 2_000
"""A pool that falls behind shall not make the client itself grow."""
TENANTS = 20
LATE_S = 0.05


class Load:
    """What one client asks of the pool, and what came of it.

    Args:
        mill: The client.
        seed: Of everything random here.
    """

    def __init__(self, mill: Client, seed: int) -> None:
        self._mill = mill
        self._random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def at_rate(self, per_s: float, seconds: float) -> None:
        """Starts jobs at a rate, whether or not earlier ones have ended."""
        began, number = time.monotonic(), 0
        while (now := time.monotonic() - began) < seconds:
            if now < number / per_s:
                await asyncio.sleep(number / per_s - now)
                continue
            number += 1
            if len(self._tasks) >= MOST_IN_FLIGHT:
                self.seen["not_sent"] += 1
                await asyncio.sleep(0)
                continue
            task = asyncio.create_task(self._one(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)

    async def as_fast(self, seconds: float) -> None:
        """Keeps a number of jobs in flight."""
        until = time.monotonic() + seconds

        async def keep(first: int) -> None:
            number = first
            while time.monotonic() < until:
                await self._one(number)
                number += AT_ONCE

        await asyncio.gather(*(keep(number) for number in range(AT_ONCE)))

    async def _one(self, number: int) -> None:
        kind = self._random.choices(
            ("stream", "result", "cancel", "late"), (40, 50, 5, 5)
        )[0]
        text = f"job {number}: " + "mill " * self._random.randrange(4)
        # What is to be cancelled or to expire would go on for minutes.
        endless = kind in ("cancel", "late")
        prompt = Prompt(
            text,
            model="echo",
            sampling=Sampling(
                max_tokens=10_000 if endless else 256, ignore_eos=endless
            ),
            tenant=f"tenant-{self._random.randrange(TENANTS)}",
            job_class=self._random.choice(list(JobClass)),
            deadline_s=LATE_S if kind == "late" else None,
        )
        job = await self._mill.submit(prompt)
        right = await {
            "stream": self._stream,
            "result": self._result,
            "cancel": self._cancel,
            "late": self._late,
        }[kind](job, text)
        self.seen[kind] += 1
        self.seen["ended"] += 1
        self.seen["wrong"] += not right

    async def _stream(self, job: Job, text: str) -> bool:
        parts = [delta.text async for delta in job.stream()]
        return "".join(parts) == text

    async def _result(self, job: Job, text: str) -> bool:
        return (await job.result()).text == text

    async def _cancel(self, job: Job, _: str) -> bool:
        async with job.stream() as stream:
            try:
                async for delta in stream:
                    if delta.token_ids:
                        break
                await job.cancel()
                await job.result()
            except JobCancelled:
                return True
        return False

    async def _late(self, job: Job, _: str) -> bool:
        try:
            await job.result()
        except JobExpired:
            return True
        return False


async def main() -> None:
    """Runs the load and prints what came of it."""
    url, seconds, per_s, seed = sys.argv[1:]
    began = time.monotonic()
    async with Client(url) as mill:
        load = Load(mill, int(seed))
        if float(per_s):
            await load.at_rate(float(per_s), float(seconds))
        else:
            await load.as_fast(float(seconds))
    report = {"wrong": 0, **load.seen, "seconds": time.monotonic() - began}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
