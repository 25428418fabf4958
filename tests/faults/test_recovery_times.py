"""How soon work goes on after a death or an outage, with default leases.

Times are those of a machine that holds nobody up: what it did is taken off.
All takes place at once in one fixture, since most of it is waiting: one pool loses its
scheduler and then a worker, another one loses Redis for twenty seconds.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import redis
from support.follower import Follower
from support.pools import MODEL, last_fence
from support.servers import SERVERS, RedisServer, running
from support.solo import Solo, solo
from support.waiting import Delay, stays, wait_until

from tokenmill import Client, Job, Prompt, Sampling
from tokenmill.shared.keys import Keys

KEYS = Keys(MODEL, 0)
LEASE_S = 10.0
AWAY_S = 20.0
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_CPU = 0.1
"""Share of a core that a process may use while Redis is away; a hot loop takes all."""


def text(number: int, length: int) -> str:
    return f"{number} " + (LETTERS * (length // 26 + 1))[:length]


def prompt(words: str) -> Prompt:
    return Prompt(words, model=MODEL, sampling=Sampling(max_tokens=10_000))


async def follow(mill: Client, words: str) -> Follower:
    return Follower(await mill.submit(prompt(words)), words)


class Measured:
    """What one scenario found, or why it could not."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.error: BaseException | None = None

    async def take(self, scenario: Callable[[], Awaitable[dict[str, float]]]) -> None:
        try:
            self.figures = await scenario()
        except BaseException as error:  # noqa: BLE001 - raised by the tests
            self.error = error

    def __getitem__(self, name: str) -> float:
        if self.error is not None:
            raise self.error
        return self.figures[name]


# --- a scheduler and a worker die ----------------------------------------------------


def fence(client: "redis.Redis") -> int:
    return int(client.hget(KEYS.scheduler, "fence") or 0)


def leader(pool: Solo) -> str:
    """Who took the lease last."""
    return max("first", "second", key=lambda name: last_fence(pool.log(name)))


async def scheduler_dies(pool: Solo, mill: Client, client: "redis.Redis") -> float:
    """Kills the active one; returns the seconds until another is."""
    before = fence(client)
    psutil.Process(pool.processes[leader(pool)].pid).kill()
    killed = time.monotonic()
    meanwhile = await mill.submit(prompt("meanwhile"))
    async with Delay() as delay:
        await wait_until(lambda: fence(client) > before, what="a takeover")
        replaced_s = time.monotonic() - killed
    assert (await meanwhile.result(timeout=60)).text == "meanwhile"
    return replaced_s - delay.allowance_s


async def worker_dies(
    pool: Solo, mill: Client, client: "redis.Redis"
) -> tuple[float, float]:
    """Kills one of two; least and most seconds until its jobs have a next token."""
    streams = [await follow(mill, text(n, 250)) for n in range(6)]
    await wait_until(lambda: all(s.begun for s in streams))
    group = pool.group("worker-0")
    held = [
        s for s in streams if client.hget(KEYS.job(s.job.id), "owner") == group.encode()
    ]
    assert 0 < len(held) < len(streams)  # both worked, so the other one has room
    psutil.Process(pool.processes["worker-0"].pid).kill()
    killed = time.monotonic()
    async with Delay() as delay:
        await asyncio.wait_for(asyncio.gather(*(s.task for s in streams)), 120)
    for stream in streams:
        stream.check()
    # Deltas on their way when it died still arrive at once.
    gaps = [s.next_after(killed + 1.0) + 1.0 for s in held]
    losses = [client.hget(KEYS.job(s.job.id), "lease_losses") for s in held]
    assert losses == [b"1"] * len(held)
    return min(gaps), max(gaps) - delay.allowance_s


async def deaths(directory: Path) -> dict[str, float]:
    with (
        running(SERVERS[-1]) as server,
        solo(directory, server.url) as pool,
        redis.Redis.from_url(server.url) as client,
    ):
        pool.schedule("first")
        pool.schedule("second", "--standby")
        for name in ("worker-0", "worker-1"):
            pool.work(name, "echo:20")
        await asyncio.to_thread(pool.wait_ready, "worker-0", "worker-1")
        async with Client(server.url) as mill:
            assert (await (await mill.submit(prompt("warm"))).result(60)).text == "warm"
            replaced_s = await scheduler_dies(pool, mill, client)
            least_s, most_s = await worker_dies(pool, mill, client)
        return {"scheduler_s": replaced_s, "least_s": least_s, "most_s": most_s}


# --- Redis goes away -----------------------------------------------------------------


async def redis_away(server: RedisServer, pool: Solo, mill: Client) -> dict[str, float]:
    """Kills Redis for twenty seconds; returns what each process took meanwhile."""
    stream = await follow(mill, text(0, 720))  # longer than Redis is away
    pool.start("tail", "tail", stream.job.id)
    await wait_until(lambda: stream.begun and pool.log("tail").stat().st_size > 20)
    names = ("scheduler", "worker", "tail")
    server.kill()
    killed = time.monotonic()
    submitting = asyncio.create_task(mill.submit(prompt("waited")))
    before = pool.cpu_s(*names)
    await stays(lambda: not submitting.done(), AWAY_S, what="nobody answers")
    after = pool.cpu_s(*names)
    async with Delay() as delay:
        await asyncio.to_thread(server.start)
        back = time.monotonic()
        waited: Job = await asyncio.wait_for(submitting, 60)
        assert (await waited.result(timeout=60)).text == "waited"
        waited_s = time.monotonic() - back - delay.allowance_s
        await asyncio.wait_for(stream.task, 120)
    stream.check()
    assert await asyncio.to_thread(pool.processes["tail"].wait, 60) == 0
    assert pool.log("tail").read_text().strip() == stream.text
    assert all(pool.processes[name].poll() is None for name in names[:2])
    with redis.Redis.from_url(server.url) as client:
        losses = int(client.hget(KEYS.job(stream.job.id), "lease_losses") or 0)
    used = {f"cpu_{n}": (after[n] - before[n]) / AWAY_S for n in names}
    reconnected_s = stream.next_after(killed + AWAY_S / 2) - (back - killed)
    return {
        "waited_s": waited_s,
        "stream_s": reconnected_s + AWAY_S / 2 - delay.allowance_s,
        "losses": losses,
        "lines": pool.log("worker").read_text().count('"redis_unreachable"'),
        **used,
    }


async def outage(directory: Path) -> dict[str, float]:
    with running(SERVERS[-1], *DURABLE) as server, solo(directory, server.url) as pool:
        pool.schedule("scheduler")
        pool.work("worker", "echo:30")
        await asyncio.to_thread(pool.wait_ready, "worker")
        async with Client(server.url) as mill:
            return await redis_away(server, pool, mill)


# --- what was measured ---------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    found = {"deaths": Measured(), "outage": Measured()}

    async def both() -> None:
        await asyncio.gather(
            found["deaths"].take(lambda: deaths(tmp_path_factory.mktemp("deaths"))),
            found["outage"].take(lambda: outage(tmp_path_factory.mktemp("outage"))),
        )

    asyncio.run(both())
    for name, one in found.items():
        figures = {key: round(value, 2) for key, value in one.figures.items()}
        sys.stdout.write(f"{name}: {figures}\n")
    return found


def test_a_dead_scheduler_is_replaced_within_three_seconds(measured) -> None:
    assert measured["deaths"]["scheduler_s"] < 3.0


def test_jobs_of_a_dead_worker_run_elsewhere_within_a_lease_and_a_second(
    measured,
) -> None:
    assert measured["deaths"]["most_s"] < LEASE_S + 1.0
    # Sooner than the last renewal allows, somebody must have been told.
    assert measured["deaths"]["least_s"] > LEASE_S / 2


def test_all_reconnect_after_redis_was_away_and_nothing_is_lost(measured) -> None:
    assert measured["outage"]["waited_s"] < 8.0
    assert measured["outage"]["stream_s"] < 8.0
    # The worker lived: its lease, which ended meanwhile, was not held against the job.
    assert measured["outage"]["losses"] == 0


def test_nothing_spins_while_redis_is_away(measured) -> None:
    found = measured["outage"]
    assert found["lines"] == 1
    for name in ("scheduler", "worker", "tail"):
        assert found[f"cpu_{name}"] < MOST_CPU, name
