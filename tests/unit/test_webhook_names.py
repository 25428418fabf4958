"""Names of receivers: a server of names that hangs holds up its own names alone."""

import asyncio
import socket
import threading

import pytest

from tokenmill.scheduler.webhook_transport import Resolver


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch):
    """What was looked up; `hung.example` is answered once `go_on` is set."""
    asked: list[str] = []
    go_on = threading.Event()

    def look_up(host: str, port: int, **_kind: object):
        asked.append(host)
        if host == "none.example":
            raise socket.gaierror("no such name")
        if host == "hung.example":
            go_on.wait(30)
        return [(0, 0, 0, "", ("198.51.100.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield asked, go_on
    go_on.set()


async def test_those_who_ask_for_one_name_meanwhile_share_a_look_up(names) -> None:
    asked, go_on = names
    resolver = Resolver()
    try:
        hung = [asyncio.create_task(resolver("hung.example", 443)) for _ in range(100)]
        (found,) = await resolver("good.example", 443)
        assert str(found) == "198.51.100.1"
        hung[0].cancel()  # its time is over; the others wait on
        go_on.set()
        first, *others = await asyncio.gather(*hung, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert [len(one) for one in others] == [1] * 99
        assert sorted(asked) == ["good.example", "hung.example"]
        await resolver("hung.example", 443)  # later it is looked up anew
        assert asked.count("hung.example") == 2
        with pytest.raises(OSError, match="no such name"):
            await resolver("none.example", 80)
    finally:
        resolver.close()
