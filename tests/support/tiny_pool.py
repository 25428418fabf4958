"""Fixtures of a pool whose workers serve one tiny model and are killed by a test.

A test module asks for them by `pytest_plugins = "support.tiny_pool"`.
"""

from collections.abc import AsyncIterator, Iterator

import pytest

from tokenmill import Client

from .fault_pool import LEASE_S, MODEL, FaultPool, fault_pool
from .tiny_models import save_tiny_model

SETTINGS = {
    "STEP_DELAY_MS": "15",
    "TOKENMILL_WORKER_LEASE_MS": str(int(LEASE_S * 1000)),
    "TOKENMILL_WORKER_THREADS": "1",
    "TOKENMILL_WORKER_KV_MEMORY_MB": "16",
}


@pytest.fixture(scope="module")
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultPool]:
    """A scheduler and, as yet, no worker.

    What a module has as its own `SETTINGS` goes before those here; `MODEL_SETTINGS`
    are those of its model that differ from others'.
    """
    directory = tmp_path_factory.mktemp("pool")
    changes = getattr(request.module, "MODEL_SETTINGS", {})
    model = save_tiny_model("llama", directory, **changes)
    settings = {**SETTINGS, **getattr(request.module, "SETTINGS", {})}
    settings["HOLD_FILE"] = str(directory / "hold")
    with fault_pool(directory, MODEL, "--model", str(model), **settings) as made:
        yield made


@pytest.fixture
async def mill(pool: FaultPool) -> AsyncIterator[Client]:
    """A client of the pool."""
    async with Client(pool.url) as client:
        yield client
