"""Jobs with a webhook, and one attempt to deliver it."""

from tokenmill.scheduler.webhook_delivery import Deliverer
from tokenmill.scheduler.webhook_transport import Poster
from tokenmill.shared.config import WebhooksConfig
from tokenmill.shared.messages import (
    Choice,
    Delta,
    End,
    FinishReason,
    JobResult,
    Usage,
    encode,
)
from tokenmill.shared.scripts import FinishItem

SECRET = "a secret of sixteen"
CONFIG = WebhooksConfig(secret=SECRET, allow_private=True, timeout_s=5, max_attempts=3)


async def ended(shard, url, text="hello", state="succeeded", **changes):
    """A job with a webhook that a worker has finished."""
    job_id, epoch = await shard.run(webhook=url, **changes)
    await shard.emit(job_id, epoch, 1, 0)
    choice = Choice(index=0, text=text, token_ids=(1,), finish_reason=FinishReason.STOP)
    usage = Usage(prompt_tokens=12, completion_tokens=1)
    result = JobResult(
        id=job_id, state=state, model="tiny", choices=(choice,), usage=usage
    )
    end = encode(Delta(end=End(state=state, usage=usage)))
    item = FinishItem(
        job_id=job_id, epoch=epoch, seq=2, state=state, result=encode(result), end=end
    )
    assert await shard.scripts.finish(group="g1", items=[item]) == ["recorded"]
    return job_id


def deliverer(client, config=CONFIG, resolve=None):
    poster = Poster(
        timeout_s=config.timeout_s,
        allow_private=config.allow_private,
        resolve=resolve,
    )
    return Deliverer(client, config, poster), poster


async def attempt(client, event_id, config=CONFIG, resolve=None):
    one, poster = deliverer(client, config, resolve)
    async with poster:
        return await one.attempt(event_id)
