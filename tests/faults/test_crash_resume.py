"""A job whose worker is killed goes on at its next token, on another worker.

Two workers run the same tiny model. Jobs with every kind of state run on one of them,
which is killed when the first has k tokens; the other, asleep until then, takes over.
"""

import asyncio
import signal

import msgspec
import pytest
from support.fault_pool import MODEL, FaultPool, WorkerProcess
from support.follower import Follower
from support.tiny_adapters import save_tiny_adapter
from support.waiting import wait_until, wait_until_sync

from tokenmill import Client, JobResult, Prompt, Sampling, SyncClient

pytest_plugins = "support.tiny_pool"
TOKENS = 60
LETTERS = dict.fromkeys(range(ord("a"), ord("z") + 1), 40.0)
SMILE = dict.fromkeys("🙂".encode(), 40.0)
"""Bytes of one character: whatever is drawn, most tokens are a character's part."""

CASES = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.1, top_p=0.95, top_k=80, min_p=0.01),
    "penalties": Sampling(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
    ),
    "logprobs": Sampling(temperature=0.9, logprobs=3),
    "choices": Sampling(temperature=1.0, n=3, logprobs=0),
    "min_tokens": Sampling(
        temperature=1.0, logit_bias=LETTERS, min_tokens=50, stop=("a", "e", "t", "s")
    ),
    "characters": Sampling(temperature=1.0, logit_bias=SMILE, logprobs=0),
    "letters": Sampling(temperature=1.0, logit_bias=LETTERS),
    "adapter": Sampling(temperature=0.9),
}
ADAPTER = "tone"
"""Of the case of that name."""


class Pair:
    """The worker that runs, and the one that will."""

    def __init__(self, pool: FaultPool) -> None:
        self._pool = pool
        self.active = pool.start_worker()
        self._next = pool.start_worker()
        self.active.wait_ready()

    def sleep_next(self) -> None:
        """Puts the second to sleep until the pool has forgotten it."""
        self._next.wait_ready()
        self._next.signal(signal.SIGSTOP)
        wait_until_sync(lambda: not self._pool.group(self._next), what="its silence")

    def both(self) -> tuple[WorkerProcess, WorkerProcess]:
        return self.active, self._next

    def fail_over(self) -> WorkerProcess:
        """Kills the first and wakes the second; a third will be the next."""
        killed, self.active = self.active, self._next
        killed.kill()
        self.active.signal(signal.SIGCONT)
        self._next = self._pool.start_worker()
        return killed


@pytest.fixture(scope="module")
def pair(pool: FaultPool) -> Pair:
    made = Pair(pool)
    path = save_tiny_adapter(pool.directory / "llama", pool.directory / ADAPTER)
    with SyncClient(pool.url) as mill:
        mill.add_adapter(ADAPTER, path, model=MODEL)
    return made


async def submit(mill: Client, cases: dict[str, Sampling]) -> dict[str, Follower]:
    prompts = [
        Prompt(
            f"Once {name} upon a time",
            model=MODEL,
            sampling=_with_length(sampling),
            adapter=ADAPTER if name == "adapter" else None,
        )
        for name, sampling in cases.items()
    ]
    jobs = await mill.submit_many(prompts)
    return {name: Follower(job) for name, job in zip(cases, jobs, strict=True)}


def _with_length(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(
        sampling, max_tokens=TOKENS, ignore_eos=True, seed=sampling.seed or 17
    )


async def results(followers: dict[str, Follower]) -> dict[str, JobResult]:
    ended = await asyncio.gather(*(one.ended() for one in followers.values()))
    return dict(zip(followers, ended, strict=True))


@pytest.mark.parametrize("k", [3, 33])
async def test_jobs_of_a_killed_worker_go_on_at_token_k(
    pool: FaultPool, mill: Client, pair: Pair, k: int
) -> None:
    free = await results(await submit(mill, {"letters": CASES["letters"]}))
    # Of its own letters from k on: when the worker dies, some of them are held back.
    stop = free["letters"].text[k : k + 14]
    half = _replaced(CASES["letters"], stop=(stop,))
    cases = {**CASES, "letters": half}
    whole = await results(await submit(mill, cases))
    assert whole["letters"].text == free["letters"].text[:k]
    assert whole["letters"].choices[0].stop_reason == stop

    await asyncio.to_thread(pair.sleep_next)
    with pool.held("greedy", k, len(cases)):
        followers = await submit(mill, cases)
        await followers["greedy"].has_tokens(k)
        owners = {pool.owner(one.job.id) for one in followers.values()}
        assert owners == {pair.active.group}, "all run there"
        assert pool.record(followers["letters"].job.id)["state"] == "running"
        pair.fail_over()
    resumed = await results(followers)
    assert resumed["adapter"].adapter is not None
    for name, result in resumed.items():
        assert result.choices == whole[name].choices, name
        assert result.adapter == whole[name].adapter
        assert result.usage == whole[name].usage
        fields = pool.record(result.id)
        assert fields["lease_losses"] == "1", name
        assert fields.get("attempts", "0") == "0"


def _replaced(sampling: Sampling, **changes: object) -> Sampling:
    return msgspec.structs.replace(sampling, **changes)


async def test_a_job_survives_two_kills(
    pool: FaultPool, mill: Client, pair: Pair
) -> None:
    """Of three workers two are killed, each while it has the job."""
    for worker in pair.both():
        await asyncio.to_thread(worker.wait_ready)
    await asyncio.to_thread(pool.ready_worker)
    cases = {"choices": CASES["choices"]}
    whole = await results(await submit(mill, cases))
    followers = await submit(mill, cases)
    job_id = followers["choices"].job.id

    def owner() -> WorkerProcess | None:
        if pool.record(job_id)["state"] != "running":
            return None
        group = pool.owner(job_id)
        return next(one for one in pool.workers if one.group == group)

    for k in (5, 30):
        with pool.held("choices", k):
            await followers["choices"].has_tokens(k)
            running = await wait_until(owner)
            assert isinstance(running, WorkerProcess)
            running.kill()
    resumed = await results(followers)
    assert resumed["choices"].choices == whole["choices"].choices
    assert pool.record(job_id)["lease_losses"] == "2"
