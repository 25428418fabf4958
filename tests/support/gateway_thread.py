"""A gateway in a thread of the test: real HTTP, no process to wait for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import uvicorn

from tokenmill.producer.gateway.app import create_app
from tokenmill.shared.config import Config, GatewayConfig, PoolConfig

from .servers import free_port
from .waiting import PATIENCE_S, wait_until_sync

HOST = "127.0.0.1"


class RunningGateway:
    """One gateway, which can be stopped and started again at its address."""

    def __init__(
        self, url: str, directory: Path, auth: Literal["keys", "none"]
    ) -> None:
        self.port = free_port()  # which nobody takes while it is stopped
        self.base = f"http://{HOST}:{self.port}"
        self._url = url
        self._config = Config(
            gateway=GatewayConfig(port=self.port, auth=auth, drain_s=0.0),
            pool=PoolConfig(state_dir=str(directory)),
        )

    def start(self) -> None:
        self.app = create_app(self._config, self._url)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                host=HOST,
                port=self.port,
                log_level="warning",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until_sync(lambda: self._server.started, what="the gateway")

    def stop(self) -> None:
        # Streams without end would hold the server up: they are told to leave.
        leaving = self.app.state.gateway.leaving
        loop = self._server.servers[0].get_loop()
        loop.call_soon_threadsafe(leaving.set)
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def serving(
    url: str, directory: Path, auth: Literal["keys", "none"] = "none"
) -> Iterator[RunningGateway]:
    """A gateway for the length of a `with` block."""
    running = RunningGateway(url, directory, auth)
    running.start()
    try:
        yield running
    finally:
        running.stop()
