"""Bodies have a size and a rate, keys a number of requests; probes have neither."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from support.waiting import loop_turns, nap

from tokenmill.producer.gateway import limits
from tokenmill.producer.gateway.errors import ApiError
from tokenmill.producer.gateway.limits import OPEN, Limits
from tokenmill.shared.config import GatewayConfig


class Client:
    """Asks once, and notes the status of what it is answered."""

    def __init__(self, layer: Limits) -> None:
        self._layer = layer
        self.status = 0
        self.body = b""
        self.num_pieces = 0

    async def ask(
        self,
        path: str,
        *,
        length: int = 0,
        every_s: float = 0.0,
        piece: bytes = b"x",
        encoding: bytes = b"identity",
    ) -> int:
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [
                (b"content-length", b"%d" % length),
                (b"content-encoding", encoding),
            ],
        }

        async def receive():
            await nap(every_s)
            self.num_pieces += 1
            more = length > self.num_pieces * len(piece)
            return {"type": "http.request", "body": piece, "more_body": more}

        await self._layer(scope, receive, self._send)
        return self.status

    async def _send(self, message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


@pytest.fixture(autouse=True)
def takes_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a refusal is a test's own matter."""
    monkeypatch.setattr(limits, "_LINGER_BYTES", 0)


async def reads_all(_scope, receive, _send) -> None:
    while (await receive())["more_body"]:
        pass


async def test_a_body_that_drips_has_a_time_that_grows_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_SLOWEST_BYTES_S", 1000)
    layer = Limits(reads_all, GatewayConfig(slow_client_s=0.2))
    dripping = Client(layer)
    async with asyncio.timeout(60):
        with pytest.raises(ApiError, match="too slowly") as refused:
            await dripping.ask("/v1/completions", length=1_000_000, every_s=0.01)
    assert refused.value.status == 408
    # As many bytes a second as it must be, and it may take longer than that.
    seconds = itertools.count()  # each piece is waited for for one
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=seconds.__next__))
    steady = Client(Limits(reads_all, GatewayConfig(slow_client_s=10)))
    piece = b"x" * 1000
    await steady.ask("/v1/completions", length=30_000, piece=piece)
    assert steady.num_pieces == 30


async def test_a_login_is_refused_by_its_length_before_it_is_read() -> None:
    client = Client(Limits(reads_all, GatewayConfig()))
    assert await client.ask("/login", length=8 * 1024 * 1024) == 413
    assert client.num_pieces == 0
    endless = Client(Limits(reads_all, GatewayConfig()))  # does not say how long it is
    with pytest.raises(ApiError, match="tm-"):
        await endless.ask("/login", piece=b"x" * 4097)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
async def test_a_body_in_an_encoding_is_refused_by_name_before_it_is_read(path) -> None:
    client = Client(Limits(reads_all, GatewayConfig()))
    assert await client.ask(path, length=100, encoding=b"GZIP") == 415
    assert client.num_pieces == 0
    assert b"Content-Encoding" in client.body


@pytest.mark.parametrize("linger_s", [0.05, 30.0])
async def test_the_rest_of_what_was_refused_is_dropped_for_a_while(
    linger_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_LINGER_BYTES", 1000)
    monkeypatch.setattr(limits, "_LINGER_S", linger_s)
    client = Client(Limits(reads_all, GatewayConfig()))
    pause_s = 30.0 if linger_s < 1 else 0.0
    async with asyncio.timeout(20):
        status = await client.ask(
            "/login", length=2**30, every_s=pause_s, piece=b"x" * 100
        )
    assert status == 413
    assert client.num_pieces == (0 if pause_s else 10)


async def test_one_key_does_not_take_all_requests() -> None:
    go_on = asyncio.Event()

    async def waits(scope, _receive, _send) -> None:
        if scope["path"] in limits.PROBES:
            return
        scope[OPEN].is_of_key(scope["path"])
        scope[OPEN].is_of_key(scope["path"])  # asked twice, counted once
        await go_on.wait()

    settings = GatewayConfig(max_requests=3, max_requests_per_key=2)
    layer = Limits(waits, settings)
    first = [asyncio.create_task(Client(layer).ask("key-1")) for _ in range(2)]
    await loop_turns()
    with pytest.raises(ApiError, match="of this key") as refused:
        await Client(layer).ask("key-1")
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    other = asyncio.create_task(Client(layer).ask("key-2"))
    await loop_turns()
    # Full: others are turned away, probes are not.
    assert await Client(layer).ask("key-3") == 503
    for probe in limits.PROBES:
        assert await Client(layer).ask(probe) == 0
    go_on.set()
    await asyncio.gather(*first, other)
    await Client(layer).ask("key-1")  # those that ended count no more
