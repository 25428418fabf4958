"""The loop of a worker, which renews leases, goes on while its engine computes."""

import asyncio
import time

import numpy as np
from support.waiting import nap, wait_until

from tokenmill.shared.config import WorkerConfig
from tokenmill.shared.messages import Sampling
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.request import EngineRequest, StepOutput
from tokenmill.workers.engine_thread import EngineThread
from tokenmill.workers.registration import HEARTBEATS_PER_LEASE

STEP_S = 0.1
FOR_S = 1.0


class Busy(EchoEngine):
    """Steps that never wait: half of each in Python, half in native code."""

    def step(self) -> StepOutput:
        began, numbers = time.perf_counter(), np.ones((200, 200))
        count = 0
        while time.perf_counter() - began < STEP_S / 2:
            count += 1
        while time.perf_counter() - began < STEP_S:
            numbers @ numbers
        return super().step()


async def delays_s() -> list[float]:
    """By how much short naps of the loop were too long, one after the other."""
    delays: list[float] = []
    ends_at = time.perf_counter() + FOR_S
    while (before := time.perf_counter()) < ends_at:
        await nap(0.01)
        delays.append(time.perf_counter() - before - 0.01)
    return delays


async def test_a_heartbeat_is_not_late_because_of_two_threads_that_compute() -> None:
    threads = [
        EngineThread(Busy(step_s=1e-9), lambda _: None, asyncio.get_running_loop())
        for _ in range(2)
    ]
    endless = Sampling(max_tokens=100_000, ignore_eos=True)
    interval_s = WorkerConfig().lease_ms / 1000 / HEARTBEATS_PER_LEASE

    async def is_prompt() -> bool:
        delays = await delays_s()
        # At the median it waits for no end of a step.
        return max(delays) < interval_s / 4 and np.median(delays) < STEP_S

    try:
        for thread in threads:
            thread.start()
            thread.add(
                [EngineRequest(id="a", token_ids=(1,), sampling=endless, seed=1)]
            )
        await wait_until(lambda: all(thread.step_age_s() for thread in threads))
        # In the first second, unless the machine itself stood still in it.
        await wait_until(is_prompt, what="a second without delay")
    finally:
        for thread in threads:
            thread.stop(2)
