"""Jobs that failed for good, made without a worker that dies."""

import json

from tokenmill.shared.redis import connect

from .shard_client import HOUR_MS, Shard, ending_of

GROUP = "w-play"


async def bury(url: str, message: str, tenant: str = "default") -> str:
    """Makes a dead letter whose error has this message; returns its id."""
    client = connect(url)
    try:
        shard = await Shard(client).open(GROUP)
        job_id = await shard.enqueue(tenant=tenant, job_class="bulk")
        epoch = await shard.run_again(job_id, GROUP)
        result, end = ending_of(job_id, "failed")
        answer = await shard.scripts.fail(
            group=GROUP,
            job_id=job_id,
            epoch=epoch,
            error=json.dumps({"code": "engine_error", "message": message}),
            delay_ms=HOUR_MS,
            max_attempts=1,
            result=result,
            end=end,
        )
        assert answer == "failed"
        return job_id
    finally:
        await client.aclose()
