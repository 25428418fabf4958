"""How one process shows itself: its card, its port, and what goes wrong with them."""

import asyncio
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from support.leaks import leaked_keys
from support.waiting import wait_until

from tokenmill.shared.announcing import announce
from tokenmill.shared.config import Config, MetricsConfig
from tokenmill.shared.keys import PROCESSES, process_key
from tokenmill.shared.metrics.catalog import DELAYED
from tokenmill.shared.metrics.serving import shown
from tokenmill.shared.metrics.targets import cards_of, keep_targets
from tokenmill.shared.pool.process_checks import examine_processes
from tokenmill.shared.process_card import ProcessCard, make_card


@pytest.fixture
async def client(newest_redis):
    import redis.asyncio

    made = redis.asyncio.Redis.from_url(newest_redis.url)
    await made.flushall()
    yield made
    await made.aclose()


async def card_of(client, count: int = 1) -> ProcessCard:
    async def there() -> bool:
        return len(await cards_of(client)) == count

    await wait_until(there, what="the card")
    return (await cards_of(client))[0]


async def scrape(url: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return reply.read().decode()

    return await asyncio.to_thread(get)


async def test_a_process_announces_itself_and_takes_its_card_back(client) -> None:
    asked: list[int] = []

    async def ask() -> None:
        asked.append(1)
        DELAYED.set(to=7)

    async with shown(client, Config(), "scheduler", name="me", ask=ask):
        card = await card_of(client)
        assert (card.kind, card.id) == ("scheduler", "me")
        assert 0 < await client.pttl(process_key("scheduler:me")) <= 30_000
        assert await leaked_keys(client) == []
        assert card.metrics_url is not None
        text = await scrape(card.metrics_url)
        assert "tokenmill_delayed_jobs 7.0" in text
        assert asked == [1]
    assert await client.keys("tm:process*") == []

    async def is_closed() -> bool:
        try:
            await scrape(str(card.metrics_url))
        except OSError:  # refused, or reset in the midst of its end
            return True
        return False

    await wait_until(is_closed, what="the port's end")


@pytest.mark.parametrize("error", [ConnectionError("no Redis"), ValueError("ours")])
async def test_without_redis_it_still_serves(client, error: Exception) -> None:
    async def fail() -> None:
        raise error

    async with shown(client, Config(), "scheduler", ask=fail):
        card = await card_of(client)
        assert card.metrics_url is not None
        assert "tokenmill_build_info" in await scrape(card.metrics_url)


async def test_a_taken_port_falls_back_and_off_is_off(client) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fixed = Config(metrics=MetricsConfig(port=port))
        with capture_logs() as logs:
            async with shown(client, fixed, "janitor"):
                card = await card_of(client)
        assert card.metrics_url is not None
        assert f":{port}/" not in card.metrics_url
        assert [log["event"] for log in logs] == [
            "metrics_port_taken",
            "metrics_served",
        ]
    off = Config(metrics=MetricsConfig(enabled=False))
    async with shown(client, off, "janitor"):
        assert (await card_of(client)).metrics_url is None
        assert [f.name for f in await examine_processes(client, off)] == ["processes"]


async def test_without_the_library_it_goes_on_and_doctor_says_so(
    client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with capture_logs() as logs:
        async with shown(client, Config(), "worker", name="w-1"):
            assert (await card_of(client)).metrics_url is None
            found = await examine_processes(client, Config())
    assert [log["event"] for log in logs] == ["metrics_off"]
    assert [(f.severity, f.name) for f in found] == [
        ("info", "processes"),
        ("warning", "metrics"),
    ]
    assert "worker w-1" in found[1].message


async def test_doctor_counts_processes_and_names_unlike_versions(client) -> None:
    assert "none" in (await examine_processes(client, Config()))[0].message
    for number, version in enumerate(("1.0", "1.0", "1.1")):
        card = make_card("worker", name=f"w-{number}", metrics_url="http://h:1/metrics")
        await announce(client, msgspec.structs.replace(card, version=version))
    count, versions = await examine_processes(client, Config())
    assert count.message == "worker 3"
    assert versions.message.endswith("1.0, 1.1")


async def test_the_targets_follow_the_processes(client, tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    await client.zadd(PROCESSES, {"worker:gone": 1})
    await client.set(process_key("worker:odd"), "no card")
    await client.zadd(PROCESSES, {"worker:odd": 2})
    await announce(client, make_card("worker", metrics_url="http://[::1]:9464/metrics"))
    keeping = asyncio.create_task(keep_targets(client, path))
    try:
        await wait_until(path.exists, what="the file")
        (entry,) = msgspec.json.decode(path.read_bytes())
        assert entry["targets"] == ["[::1]:9464"]
        assert entry["labels"]["kind"] == "worker"
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    assert not path.exists()
