"""The janitor's part in webhooks, running in a test's own process."""

import asyncio
import contextlib

import redis.asyncio

from tokenmill.scheduler.events import DoneReader
from tokenmill.scheduler.webhook_service import run_webhooks
from tokenmill.scheduler.webhooks import Webhooks
from tokenmill.shared.bulk.keys import BELL
from tokenmill.shared.config import Config, WebhooksConfig
from tokenmill.shared.webhook_keys import delivery_key

from .waiting import wait_until

SECRET = "a secret of sixteen"
CONFIG = Config(
    webhooks=WebhooksConfig(secret=SECRET, allow_private=True, timeout_s=60)
)


@contextlib.asynccontextmanager
async def serving(url):
    """The janitor's part: it delivers, and hears of ends of jobs."""
    client = redis.asyncio.Redis.from_url(url)
    reader = DoneReader(client, (Webhooks(client).on_done,), bell=BELL)

    async def hear():
        while True:
            await reader.step()

    tasks = [
        asyncio.create_task(run_webhooks(url, CONFIG)),
        asyncio.create_task(hear()),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()


def came(receiver, count):
    return wait_until(lambda: len(receiver.requests) >= count, what=f"{count} webhooks")


async def settled(client, event_id, state="delivered"):
    async def is_so():
        return await client.hget(delivery_key(event_id), "state") == state.encode()

    await wait_until(is_so, what=f"{event_id} {state}")
