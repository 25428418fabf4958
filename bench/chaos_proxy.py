"""A TCP proxy before Redis that can drop its connections, or hold them in silence."""

import asyncio
import contextlib
import threading


class Proxy:
    """Forwards to `port` from a port of its own, in a thread.

    Args:
        port: Where Redis listens on this host.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the proxy did not start within 10 s")

    def drop(self) -> None:
        """Breaks every connection at once."""
        self._loop.call_soon_threadsafe(self._drop)

    def freeze(self, seconds: float) -> None:
        """Forwards nothing for a while, as when a network is split."""
        self._loop.call_soon_threadsafe(self._flows.clear)
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._flows.set)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._flows.set()
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._drop()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.add(writer)
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()  # Redis is down: so is this connection
            self._writers.discard(writer)
            return
        self._writers.add(away)
        try:
            await asyncio.gather(self._pump(reader, away), self._pump(there, writer))
        finally:
            for one in (writer, away):
                self._writers.discard(one)
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):  # either side may break: that is its purpose
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
