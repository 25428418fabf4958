"""A receiver of webhooks: a small HTTP server that a test tells what to answer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

Answer = str | bytes | None
"""A status line with further header lines, whole bytes, or None: nothing is said."""


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """What came, and what is answered to each in turn; the last answer stays."""

    answers: list[Answer] = field(default_factory=lambda: ["200 OK"])
    requests: list[Received] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    delay: Callable[[], Any] | None = None

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    @property
    def ids(self) -> list[str]:
        return [request.headers["webhook-id"] for request in self.requests]

    async def handle(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(
                line.lower().split(": ", 1)
                if not line.lower().startswith("webhook")
                else (line.split(": ", 1)[0].lower(), line.split(": ", 1)[1])
                for line in head[1:]
                if line
            )
            size = int(headers.get("content-length", "0"))
            body = await reader.readexactly(size)
            self.requests.append(Received(head[0].split(" ")[1], headers, body))
            number = min(len(self.requests), len(self.answers)) - 1
            answer = self.answers[number]
            if answer is None:
                await reader.read()  # until the other side gives up
            elif isinstance(answer, bytes):
                writer.write(answer)
            else:
                writer.write(f"HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n".encode())
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def receiving(
    *answers: Answer, ssl: Any = None, port: int = 0
) -> AsyncIterator[Receiver]:
    """A receiver for the length of a `with` block."""
    receiver = Receiver(list(answers) or ["200 OK"])
    server = await asyncio.start_server(receiver.handle, "127.0.0.1", port, ssl=ssl)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await server.wait_closed()
