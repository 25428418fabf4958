"""A gateway on the test's own event loop, behind a real server and port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from support.servers import free_port
from support.waiting import wait_until

from tokenmill.producer.gateway.app import create_app
from tokenmill.producer.gateway.context import Gateway
from tokenmill.shared.config import Config, GatewayConfig, PoolConfig


def gateway_config(directory: Path, **settings: object) -> Config:
    """Settings of a gateway that keeps its files in a directory."""
    return Config(
        pool=PoolConfig(state_dir=str(directory)),
        gateway=GatewayConfig(**{"drain_s": 0.1, **settings}),  # type: ignore[arg-type]
    )


class Served:
    """A gateway that answers, and a client of it."""

    def __init__(self, owner: Gateway, http: httpx.AsyncClient) -> None:
        self.owner = owner
        self.http = http
        self.url = str(http.base_url)


@asynccontextmanager
async def served(config: Config, url: str, **headers: str) -> AsyncIterator[Served]:
    """Serves for the length of a `with` block.

    Args:
        config: Settings in force.
        url: Of Redis.
        headers: That the client sends with every request.
    """
    app = create_app(config, url)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=free_port(),
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=2,
            ws="none",
        )
    )
    server.config.load()
    serving = asyncio.create_task(server._serve())
    await wait_until(lambda: server.started or serving.done(), what="the gateway")
    assert not serving.done(), serving.result()
    base = f"http://127.0.0.1:{server.config.port}"
    try:
        async with httpx.AsyncClient(
            base_url=base, headers=headers, timeout=60, trust_env=False
        ) as http:
            yield Served(app.state.gateway, http)
    finally:
        app.state.gateway.leaving.set()
        server.should_exit = True
        await serving
