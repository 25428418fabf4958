"""Batches through the official client: begun, waited for, read."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import redis.asyncio

from tokenmill.shared.keys import MODELS

from .pools import UpProcess
from .waiting import wait_until

URL = "/v1/completions"


def line(number: int, prompt: str | None = None, **body: object) -> dict:
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": URL,
        "body": {
            "model": "echo",
            "prompt": prompt or f"prompt number {number}",
            "max_tokens": 100,
            **body,
        },
    }


def encoded(lines: list) -> bytes:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    return "\n".join(texts).encode()


async def begun(client, lines: list, **fields) -> openai.types.Batch:
    file = await client.files.create(file=("in.jsonl", encoded(lines)), purpose="batch")
    return await client.batches.create(
        **{
            "input_file_id": file.id,
            "endpoint": URL,
            "completion_window": "24h",
            **fields,
        }
    )


async def ended(client, batch, status: str = "completed") -> openai.types.Batch:
    """The batch once it has ended."""
    found: list[openai.types.Batch] = []

    async def look() -> bool:
        now = await client.batches.retrieve(batch.id)
        found.append(now)
        return now.status in ("completed", "failed", "expired", "cancelled")

    await wait_until(look, every_s=0.05, what=f"the end of {batch.id}")
    assert found[-1].status == status, found[-1]
    return found[-1]


async def content_of(client, file_id: str) -> list[dict]:
    content = await client.files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]


@asynccontextmanager
async def nobody_serves(pool: UpProcess, model: str) -> AsyncIterator[None]:
    """A model is known whose jobs wait for ever."""
    async with redis.asyncio.Redis.from_url(pool.url) as store:
        card = await store.hget(MODELS, "echo")
        named = card.replace(b'"echo"', f'"{model}"'.encode(), 1)
        await store.hset(MODELS, model, named)
        try:
            yield
        finally:
            await store.hdel(MODELS, model)
