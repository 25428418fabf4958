"""A job that takes its worker along: run alone, then dead. Its neighbours all end well.

`tokenmill up` restarts the workers; their steps hang or die while a marked prompt is
in the engine (support/injected).
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
import redis
from support.fault_pool import with_faults
from support.pools import MODEL, up
from support.waiting import wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.errors import JobFailed
from tokenmill.shared.keys import Keys

KEYS = Keys(MODEL, 0)
NEIGHBOURS = 8
QUICK = {
    "POISON": "1",
    "TOKENMILL_WORKER_STEP_TIMEOUT_S": "1",
    "TOKENMILL_WORKER_LEASE_MS": "3000",
    "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000",
}


def prompts(mark: str) -> list[Prompt]:
    """Neighbours, with the poison among them."""
    texts = [f"neighbour {index} " * 2 for index in range(NEIGHBOURS)]
    texts.insert(3, f"poison {mark}")
    return [
        Prompt(text, model=MODEL, sampling=Sampling(max_tokens=100)) for text in texts
    ]


@pytest.mark.parametrize(
    ("workers", "mark", "cause"),
    [
        ("1", "<hang>", "a step took longer than worker.step_timeout_s=1 s"),
        ("2", "<hang>", "a step took longer than worker.step_timeout_s=1 s"),
        ("1", "<kill>", "the worker was killed by SIGKILL"),
        ("2", "<crash>", "the worker was killed by SIGSEGV"),
    ],
)
async def test_a_poison_job_ends_among_the_dead_and_its_neighbours_well(
    tmp_path: Path, workers: str, mark: str, cause: str
) -> None:
    faults = {**QUICK, **with_faults()}
    with up(tmp_path, "--workers", workers, engine="echo:5", **faults) as pool:
        async with Client(pool.url) as mill:
            jobs = await mill.submit_many(prompts(mark))
            poison = jobs.pop(3)
            results = await asyncio.gather(*(job.result(timeout=150) for job in jobs))
            with pytest.raises(JobFailed) as failed:
                await poison.result(timeout=150)
        with redis.Redis.from_url(pool.url, decode_responses=True) as client:
            check_records(client, poison.id, [job.id for job in jobs])
            await wait_until(lambda: idle(client), what="all credit back")
    for index, result in enumerate(results):
        assert result.text == f"neighbour {index} " * 2
    message = str(failed.value)
    assert "3 workers were lost while running this job" in message
    assert "1 of them while it ran alone" in message
    assert cause in message


def check_records(client: "redis.Redis", poison: str, neighbours: list[str]) -> None:
    record = client.hgetall(KEYS.job(poison))
    assert record["state"] == "failed"
    assert record["lease_losses"] == "3"
    assert record["alone_losses"] == "1"
    assert msgspec.json.decode(record["last_error"])["code"] == "lease_lost"
    assert [fields["id"] for _, fields in client.xrange(KEYS.dead)] == [poison]
    for job_id in neighbours:
        record = client.hgetall(KEYS.job(job_id))
        assert record["state"] == "succeeded"
        assert int(record.get("lease_losses", 0)) <= 2
        assert int(record.get("attempts", 0)) == 0


def idle(client: "redis.Redis") -> bool:
    """Whether the groups that live have all their credit, and nobody runs alone."""
    groups = [client.hgetall(KEYS.group(g)) for g in client.zrange(KEYS.groups, 0, -1)]
    live = [group for group in groups if group]
    return bool(live) and all(
        (group["credit_running"], group["alone"]) == (group["max_running"], "")
        for group in live
    )
