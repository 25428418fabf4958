"""A worker with an echo engine, and adapters, on the test's own event loop."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tokenmill.shared.config import Config, SchedulerConfig, WorkerConfig
from tokenmill.shared.keys import Keys
from tokenmill.shared.messages import ModelCard
from tokenmill.workers.bridge import Worker
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.registration import WorkerSpec

MODEL = "echo"
CARD = ModelCard(
    model=MODEL,
    max_context=4096,
    vocab_size=257,
    tokenizer="bytes",
    has_chat_template=True,
    weights_version="echo",
)
CONFIG = Config(
    scheduler=SchedulerConfig(leader_lease_ms=300),
    # Longer than what may hold this process up: a gateway that starts in it, a load.
    worker=WorkerConfig(lease_ms=6000, drain_s=0.2, emit_ms=5),
)


@asynccontextmanager
async def working(
    client,
    adapters: AdapterCache | None,
    step_ms: float = 0,
    *,
    version: str = "v1",
    weights: str = CARD.weights_version,
) -> AsyncIterator[Worker]:
    """A worker with an echo engine for the length of a `with` block."""
    spec = WorkerSpec(
        group=f"w-{secrets.token_hex(8)}",
        card=msgspec.structs.replace(CARD, weights_version=weights),
        version=version,
        bundle=None,
        block_size=8,
        batch_tokens=100_000,
    )
    worker = Worker(
        client=client,
        keys=Keys(MODEL, 0),
        engine=EchoEngine(max_running=64, step_s=step_ms / 1000),
        spec=spec,
        config=CONFIG,
        adapters=adapters,
    )
    await worker.announce()
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.drain()
        await asyncio.wait_for(task, 60)
