"""Adapters from outside: HTTP, batches, bulk files, commands, metrics, doctor."""

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from support.adapter_pool import CONFIG, MODEL, working
from support.plain_adapters import save_plain_adapter
from support.scheduled_pool import scheduling
from support.served import Served, gateway_config, served
from support.waiting import wait_until
from typer.testing import CliRunner

from tokenmill import Client, Prompt
from tokenmill.__main__ import build_app
from tokenmill.producer.bulk.accepted import accepted_by
from tokenmill.producer.bulk.requests import RequestReader
from tokenmill.shared.adapters_registry import AdapterRegistry
from tokenmill.shared.keys import Keys
from tokenmill.shared.messages import AdapterRef
from tokenmill.shared.metrics import catalog
from tokenmill.shared.pool.adapter_check import examine_adapters
from tokenmill.shared.pool.shard_checks import findings_of
from tokenmill.shared.scripts import Scripts
from tokenmill.workers.adapters_echo import echo_adapters
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.shown import EngineGauges

pytest_plugins = "support.keyed_gateway"


@pytest.fixture
def adapters_held() -> AdapterCache:
    return echo_adapters(1 << 20, 16)


@pytest.fixture
async def adapters_mill(
    empty_redis, newest_redis, adapters_held, tmp_path
) -> AsyncIterator[Client]:
    """A pool whose model has an adapter for all, and one of the tenant `acme`."""
    async with (
        scheduling(empty_redis, CONFIG),
        working(empty_redis, adapters_held),
        Client(newest_redis.url) as mill,
    ):
        path = save_plain_adapter(tmp_path / "tone")
        await mill.add_adapter("tone", path, model=MODEL)
        await mill.add_adapter("own", path, model=MODEL, tenant="acme")
        yield mill


@pytest.fixture
async def adapters_gateway(
    newest_redis, adapters_mill, tmp_path
) -> AsyncIterator[Served]:
    async with served(gateway_config(tmp_path / "state"), newest_redis.url) as made:
        yield made


def body(model: str) -> dict[str, object]:
    return {"model": model, "prompt": "hello", "max_tokens": 64}


async def test_a_model_with_an_adapter_is_a_model_of_openais_api(
    adapters_gateway: Served,
) -> None:
    http = adapters_gateway.http
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed][:2] == [
        ("echo", None),
        ("echo:tone", "echo"),
    ]
    shown = (await http.get("/v1/models/echo:tone")).json()
    assert shown["parent"] == "echo"
    answered = (await http.post("/v1/completions", json=body("echo:tone"))).json()
    assert answered["model"] == "echo:tone"
    assert answered["choices"][0]["text"] == "tone: hello"
    stream = {**body("echo:tone"), "stream": True}
    text = (await http.post("/v1/completions", json=stream)).text
    assert '"model":"echo:tone"' in text
    unknown = await http.post("/v1/completions", json=body("echo:nothing"))
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "unknown_adapter"
    assert "it has tone" in unknown.json()["error"]["message"]
    assert (await http.get("/v1/models/echo:nothing")).status_code == 404


async def test_the_jobs_api_takes_an_adapter_and_shows_what_ran(
    adapters_gateway: Served,
) -> None:
    http = adapters_gateway.http
    asked = {"text": "hello", "model": "echo", "adapter": "tone"}
    made = await http.post("/v1/jobs", json=asked)
    assert made.status_code < 300, made.text
    name = made.json()["id"]

    async def ended() -> object:
        shown = (await http.get(f"/v1/jobs/{name}")).json()
        return shown["output"]

    output = await wait_until(ended)
    assert output["text"] == "tone: hello"
    assert output["adapter"]["name"] == "tone"


async def test_an_adapter_of_a_tenant_is_not_there_for_others(
    gateway, keys, adapters_mill
) -> None:
    async def status(who: str, path: str) -> int:
        return (await gateway.http.get(path, headers=keys[who])).status_code

    async def names(who: str) -> list[str]:
        answered = await gateway.http.get("/v1/models", headers=keys[who])
        return [one["id"] for one in answered.json()["data"]]

    assert "echo:own" in await names("acme-user")
    assert "echo:own" not in await names("admin")
    assert await status("acme-user", "/v1/models/echo:own") == 200
    assert await status("admin", "/v1/models/echo:own") == 404
    asked = body("echo:own")
    mine = await gateway.http.post(
        "/v1/completions", json=asked, headers=keys["acme-user"]
    )
    assert mine.json()["choices"][0]["text"] == "own: hello"
    other = await gateway.http.post(
        "/v1/completions", json=asked, headers=keys["admin"]
    )
    assert other.status_code == 404
    assert "own" not in other.json()["error"]["message"].partition("it has")[2]


async def test_lines_of_bulk_files_name_adapters_in_both_forms(adapters_mill) -> None:
    accepted = await accepted_by(adapters_mill, "default")
    reader = RequestReader(accepted, MODEL)

    def read(line: dict[str, object]):
        return reader.read(json.dumps(line).encode())

    simple = read({"id": 1, "prompt": "x", "options": {"adapter": "tone"}})
    assert simple.error is None
    assert simple.content.adapter == "tone"
    form = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    open_ai = read({**form, "body": body("echo:tone")})
    assert open_ai.error is None
    assert (open_ai.content.model, open_ai.content.adapter) == ("echo", "tone")
    wrong = read({**form, "body": body("echo:own")})
    assert wrong.error.code == "unknown_adapter"
    assert str(wrong.error).endswith("it has tone")


async def test_commands_register_list_use_and_remove(
    adapters_mill, newest_redis, tmp_path
) -> None:
    path = save_plain_adapter(tmp_path / "second", value=3.0)

    async def command(*words: str) -> tuple[int, list[str]]:
        """Exit code and lines, with those that the pool logs in this process."""
        given = [*words, "--url", newest_redis.url]
        done = await asyncio.to_thread(CliRunner().invoke, build_app(), given)
        return done.exit_code, done.output.splitlines()

    code, text = await command(
        *("lora", "add", "second", "--model", MODEL, "--path", str(path))
    )
    assert code == 0, text
    assert "echo:second" in text
    code, text = await command("lora", "list", "--json")
    cards = [json.loads(line) for line in text if line.startswith("{")]
    assert [one["name"] for one in cards] == ["own", "second", "tone"]
    code, text = await command(
        *("submit", "hello", "--model", MODEL, "--adapter", "second")
    )
    assert "second: hello" in text
    code, text = await command(
        *("lora", "add", "second", "--model", MODEL, "--path", str(tmp_path))
    )
    assert code == 4
    assert "'second' is refused" in str(text)
    code, text = await command("lora", "remove", "second", "--model", MODEL)
    assert (code, "echo:second is removed" in text) == (0, True)
    code, text = await command("submit", "x", "--model", "echo:second")
    assert code == 4
    assert "it has tone" in str(text)


async def test_metrics_and_doctor_tell_of_adapters(
    adapters_mill, adapters_held, empty_redis
) -> None:
    EngineGauges(MODEL, EchoEngine().capacity, adapters_held)()
    before = catalog.ADAPTER_LOADS.values[(MODEL,)]
    job = await adapters_mill.submit(Prompt("x", model="echo:tone"))
    assert (await job.result(timeout=60)).adapter.name == "tone"
    EngineGauges(MODEL, EchoEngine().capacity, adapters_held)()
    assert catalog.ADAPTER_LOADS.values[(MODEL,)] == before + 1
    assert catalog.ADAPTERS.values[(MODEL,)] == 1
    (found,) = await examine_adapters(empty_redis, [MODEL, "other"])
    assert found.message == "2 registered: own, tone"
    registry = AdapterRegistry(empty_redis, MODEL)
    own = msgspec.structs.replace((await registry.cards())[0], base="other")
    await registry.add(own)
    (found,) = await examine_adapters(empty_redis, [MODEL])
    assert "; checked on other weights or in another precision: own (" in found.message

    async def told() -> bool:
        (info,) = await Scripts(empty_redis, Keys(MODEL, 0)).groups()
        lines = [one.message for one in findings_of(info)]
        return "1 in memory; 1 loaded, 0 of them evicted for others" in lines

    await wait_until(told)
    (card, _) = await registry.cards()
    assert card.ref == AdapterRef("own", card.digest)
