"""An interactive job on a worker that bulk fills: the whole pool, a tiny model."""

import asyncio

from support.fault_pool import MODEL, FaultPool
from support.follower import Follower
from support.waiting import wait_until

from tokenmill import Client, JobClass, Prompt, Sampling
from tokenmill.shared.messages import Choice

pytest_plugins = "support.tiny_pool"
STEP_S = 0.02
TOKENS = 200
"""Of a bulk job, which are compared..."""
LONG = 800
"""...and that it would make: much longer than all here takes."""
MODEL_SETTINGS = {"max_position_embeddings": 1024}
SETTINGS = {
    "STEP_DELAY_MS": str(int(STEP_S * 1000)),
    "TOKENMILL_WORKER_MAX_RUNNING": "3",
}


def prompt(text: str, tokens: int, job_class: JobClass) -> Prompt:
    sampling = Sampling(max_tokens=tokens, temperature=0.9, seed=5, ignore_eos=True)
    return Prompt(text, model=MODEL, sampling=sampling, job_class=job_class)


async def enough(bulk: Follower) -> None:
    """Has it run until it can be compared; another one then has its place."""
    await bulk.has_tokens(TOKENS)
    await bulk.job.cancel()
    await asyncio.gather(bulk.task, return_exceptions=True)


def begins_like(bulk: Follower, whole: Choice) -> bool:
    """Whether nothing is missing or repeated, and all is as it was undisturbed."""
    ids: list[int] = []
    for delta in bulk.deltas:
        assert delta.offset == len(ids), "a gap, or a token twice"
        ids += delta.token_ids
    text = "".join(delta.text for delta in bulk.deltas)
    # At its end what is no whole character yet is written out.
    return tuple(ids[:TOKENS]) == whole.token_ids and text.startswith(whole.text[:-4])


async def test_an_interactive_job_takes_the_place_of_bulk(
    pool: FaultPool, mill: Client
) -> None:
    worker = pool.ready_worker()
    undisturbed = await mill.submit_many(
        [prompt(f"bulk {index}", TOKENS, JobClass.BULK) for index in range(3)]
    )
    alone = [await job.result(timeout=60) for job in undisturbed]
    jobs = await mill.submit_many(
        [prompt(f"bulk {index % 3}", LONG, JobClass.BULK) for index in range(6)]
    )
    bulk = [Follower(job) for job in jobs]
    # Three run, three wait; all slots are taken.
    await wait_until(lambda: sum(one.num_tokens > 0 for one in bulk) == 3)
    for index in range(4):
        job = await mill.submit(prompt(f"now {index}", 10, JobClass.INTERACTIVE))
        before = max(one.num_tokens for one in bulk)
        result = await job.result(timeout=60)
        # In the time in which bulk, had it to end first, would make many more tokens.
        after = max(one.num_tokens for one in bulk)
        assert after - before < LONG / 2
        assert result.usage.completion_tokens == 10
        assert not any(one.task.done() for one in bulk), "bulk was not waited for"
    await asyncio.gather(*(enough(one) for one in bulk))
    for index, one in enumerate(bulk):
        assert begins_like(one, alone[index % 3].choices[0])
        assert pool.record(one.job.id).get("lease_losses", "0") == "0"
    await wait_until(lambda: pool.group(worker)["num_running"] == "0")
    group = pool.group(worker)
    assert int(group["preemptions"]) >= 4
    assert group["overruns"] == "0"
    assert group["credit_running"] == group["max_running"]
    assert (group["bulk_running"], group["bulk_blocks"]) == ("0", "0")
