"""Sending: an open loop that never waits for answers, and a closed one that does."""

import asyncio
import time
from collections.abc import Iterator

from load_measure import Sample
from load_plan import Request, Step, poisson_times
from load_sides import Sender


async def drive(
    side: Sender, step: Step, requests: Iterator[Request], duration_s: float, seed: int
) -> list[Sample]:
    """Runs one step to the end of its last request.

    Args:
        side: Where to send.
        step: How much.
        requests: What; as many as are needed are taken.
        duration_s: How long requests are begun.
        seed: Of the arrivals of an open loop.
    """
    if step.mode == "open":
        times = poisson_times(step.level, duration_s, seed)
        return await open_loop(side, times, requests)
    return await closed_loop(side, int(step.level), requests, duration_s)


async def _send(side: Sender, request: Request, intended: float) -> Sample:
    sample = Sample(intended=intended, sent=time.monotonic())
    await side.send(request, sample)
    return sample


async def open_loop(
    side: Sender, times: list[float], requests: Iterator[Request]
) -> list[Sample]:
    """Sends at given times, however many answers are still missing.

    Args:
        side: Where to send.
        times: Seconds from now, rising.
        requests: What.
    """
    begin = time.monotonic()
    running: list[asyncio.Task[Sample]] = []
    for after, request in zip(times, requests, strict=False):
        at = begin + after
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        running.append(asyncio.create_task(_send(side, request, at)))
    return list(await asyncio.gather(*running))


async def closed_loop(
    side: Sender, users: int, requests: Iterator[Request], duration_s: float
) -> list[Sample]:
    """Some users who each send again when they have their answer.

    Args:
        side: Where to send.
        users: How many.
        requests: What.
        duration_s: How long they begin new ones.
    """
    end = time.monotonic() + duration_s
    samples: list[Sample] = []

    async def user() -> None:
        while time.monotonic() < end:
            samples.append(await _send(side, next(requests), time.monotonic()))

    await asyncio.gather(*(user() for _ in range(users)))
    return samples
