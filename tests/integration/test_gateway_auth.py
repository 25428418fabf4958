"""API keys: who may do what, for whom, and how keys come and go."""

import asyncio
import json
import signal

import httpx
import openai
import pytest
import redis
import typer
from support.commands import CommandPool
from support.openai_clients import async_client
from support.served import Served, gateway_config, served
from support.waiting import wait_until
from typer.testing import CliRunner

from tokenmill.producer.cli_keys import register_keys
from tokenmill.producer.gateway import auth
from tokenmill.producer.gateway.server import require_keys
from tokenmill.shared.api_keys import KeyStore, Scope
from tokenmill.shared.config import GatewayConfig
from tokenmill.shared.errors import ConfigError, InvalidRequest
from tokenmill.shared.keys import API_KEYS
from tokenmill.shared.messages import DEFAULT_MODEL

COMPLETIONS = "/v1/completions"
BODY = {"model": DEFAULT_MODEL, "prompt": "a b c"}


@pytest.fixture
async def gateway(newest_redis, group, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "KEY_AGE_S", 0.0)
    async with served(gateway_config(tmp_path), newest_redis.url) as made:
        yield made


@pytest.fixture
def store(empty_redis) -> KeyStore:
    return KeyStore(empty_redis)


async def asked(gateway: Served, key: str | None = None, **headers: str):
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return await gateway.http.post(COMPLETIONS, json=BODY, headers=headers)


def code_of(reply: httpx.Response) -> str:
    return reply.json()["error"]["code"]


# --- keys -----------------------------------------------------------------------------
async def test_keys_are_kept_as_hashes_alone(store: KeyStore, empty_redis) -> None:
    secret, record = await store.create("acme", [Scope.INFERENCE])
    assert secret.startswith("tm-")
    raw = await empty_redis.hgetall(API_KEYS)
    assert secret not in str(raw)
    assert [json.loads(value)["id"] for value in raw.values()] == [record.id]
    with pytest.raises(InvalidRequest, match="tenant"):
        await store.create("no tenant", [Scope.INFERENCE])
    with pytest.raises(InvalidRequest, match="scope"):
        await store.create("acme", [])


async def test_without_keys_this_host_needs_none(gateway: Served) -> None:
    assert (await asked(gateway)).status_code == 200
    assert (await asked(gateway, "whatever-the-client-insists-on")).status_code == 200


async def test_once_there_is_a_key_everyone_needs_one(
    gateway: Served, store: KeyStore
) -> None:
    secret, record = await store.create("acme", [Scope.INFERENCE])
    refused = await asked(gateway)
    assert (refused.status_code, code_of(refused)) == (401, "missing_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    for empty in ("", "Bearer"):
        headers = {"authorization": empty}
        refused = await gateway.http.get("/v1/models", headers=headers)
        assert (refused.status_code, code_of(refused)) == (401, "missing_api_key")
    refused = await asked(gateway, "tm-wrong")
    assert (refused.status_code, code_of(refused)) == (401, "invalid_api_key")
    reply = await asked(gateway, secret)
    assert reply.status_code == 200
    job = gateway.owner.client.job(reply.headers["x-tokenmill-job"])
    assert (await job.info()).tenant == "acme"

    await store.revoke(record.id)
    assert (await asked(gateway, secret)).status_code == 401
    # The last key is gone, and the door is not open again.
    assert (await asked(gateway)).status_code == 401


async def test_the_official_client_is_known_by_its_key(
    gateway: Served, store: KeyStore
) -> None:
    secret, _ = await store.create("acme", [Scope.INFERENCE])
    base = gateway.url.rstrip("/")
    async with async_client(base, secret) as client:
        found = await client.completions.create(**BODY)
        assert found.choices[0].text == "a b c"
    async with async_client(base, "tm-wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(**BODY)


async def test_a_key_does_what_its_scopes_say(gateway: Served, store: KeyStore) -> None:
    reads, _ = await store.create("acme", [Scope.READ])
    refused = await asked(gateway, reads)
    assert (refused.status_code, code_of(refused)) == (403, "insufficient_scope")
    admin, _ = await store.create("ops", [Scope.ADMIN])
    assert (await asked(gateway, admin)).status_code == 200


def scope_of(path: str) -> Scope | None:
    """What a path asks of every caller; None: any key will do."""
    if path.startswith("/v1/admin/dead/"):
        return Scope.ADMIN
    if path == "/v1/admin/me":
        return None
    if path.startswith(("/v1/admin/", "/v1/usage")):
        return Scope.READ
    if path.startswith(("/v1/files", "/v1/batches", "/v1/bulk")):
        return Scope.BATCH
    return Scope.INFERENCE


async def test_every_path_asks_for_a_key_and_for_its_scope(
    gateway: Served, store: KeyStore
) -> None:
    """All that the document has: what is added later is not forgotten here."""
    usual = {Scope.INFERENCE, Scope.BATCH, Scope.READ}
    lacking = {
        scope: (await store.create("acme", sorted(usual - {scope})))[0]
        for scope in Scope
    }
    document = (await gateway.http.get("/openapi.json")).json()
    found = {(m, path) for path, item in document["paths"].items() for m in item}
    assert len(found) > 30
    for method, path in found:
        if path in ("/healthz", "/readyz", "/login", "/logout"):
            continue
        unnamed = await gateway.http.request(method, path)
        assert (unnamed.status_code, path) == (401, path)
        scope = scope_of(path)
        if scope is not None:
            headers = {"Authorization": f"Bearer {lacking[scope]}"}
            refused = await gateway.http.request(method, path, headers=headers)
            assert (refused.status_code, path) == (403, path)
            assert code_of(refused) == "insufficient_scope"


async def test_tenants_do_not_see_each_other(gateway: Served, store: KeyStore) -> None:
    ours, _ = await store.create("acme", [Scope.INFERENCE])
    theirs, _ = await store.create("umbrella", [Scope.INFERENCE])
    admin, _ = await store.create("ops", [Scope.ADMIN])
    job_id = (await asked(gateway, ours)).headers["x-tokenmill-job"]

    async def look(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return (
            await gateway.http.get(f"/v1/jobs/{job_id}", headers=headers)
        ).status_code

    assert [await look(key) for key in (ours, theirs, admin)] == [200, 404, 200]


async def test_only_an_admin_acts_for_another_tenant(
    gateway: Served, store: KeyStore
) -> None:
    ours, _ = await store.create("acme", [Scope.INFERENCE])
    admin, _ = await store.create("ops", [Scope.ADMIN])
    header = auth.TENANT_HEADER
    refused = await asked(gateway, ours, **{header: "umbrella"})
    assert (refused.status_code, code_of(refused)) == (403, "tenant_refused")
    assert (await asked(gateway, ours, **{header: "acme"})).status_code == 200
    reply = await asked(gateway, admin, **{header: "umbrella"})
    job = gateway.owner.client.job(reply.headers["x-tokenmill-job"])
    assert (await job.info()).tenant == "umbrella"
    assert (await asked(gateway, admin, **{header: "a b"})).status_code == 400


async def test_a_field_names_a_tenant_under_the_same_rule(
    gateway: Served, store: KeyStore
) -> None:
    ours, _ = await store.create("acme", [Scope.INFERENCE])
    admin, _ = await store.create("ops", [Scope.ADMIN])
    body = {**BODY, "tenant": "umbrella"}

    async def submitted(key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return await gateway.http.post(COMPLETIONS, json=body, headers=headers)

    refused = await submitted(ours)
    assert (refused.status_code, code_of(refused)) == (403, "tenant_refused")
    job_id = (await submitted(admin)).headers["x-tokenmill-job"]
    assert (await gateway.owner.client.job(job_id).info()).tenant == "umbrella"


async def test_a_key_has_so_many_requests_open_at_once(
    newest_redis, group, store: KeyStore, tmp_path
) -> None:
    ours, _ = await store.create("acme", [Scope.INFERENCE])
    theirs, _ = await store.create("umbrella", [Scope.INFERENCE])
    config = gateway_config(tmp_path, max_requests_per_key=1)
    async with served(config, newest_redis.url) as gateway:
        await group.pause()
        waiting = [asyncio.create_task(asked(gateway, key)) for key in (ours, theirs)]

        async def are_queued() -> bool:
            return len(await gateway.owner.client.jobs()) == 2

        await wait_until(are_queued)
        refused = await asked(gateway, ours)
        assert (refused.status_code, code_of(refused)) == (429, "too_many_requests")
        assert "retry-after" in refused.headers
        assert (await gateway.http.get("/healthz")).status_code == 200
        group.serving.set()
        assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [
            200
        ] * 2
        assert (await asked(gateway, ours)).status_code == 200


# --- browsers -------------------------------------------------------------------------
async def test_pages_of_others_cannot_use_an_open_gateway(gateway: Served) -> None:
    refused = await asked(gateway, Origin="https://evil.example")
    assert (refused.status_code, code_of(refused)) == (403, "origin_refused")
    # A name of theirs that was made to point here.
    refused = await asked(gateway, Host="evil.example")
    assert (refused.status_code, code_of(refused)) == (403, "host_refused")
    assert (await asked(gateway, Origin=gateway.url.rstrip("/"))).status_code == 200
    # A picture of theirs: no `Origin`, and browsers say so in another way.
    models = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    refused = await gateway.http.get("/v1/models", headers=models)
    assert (refused.status_code, code_of(refused)) == (403, "origin_refused")
    models["Sec-Fetch-Mode"] = "navigate"  # a link, which leads to no act
    assert (await gateway.http.get("/v1/models", headers=models)).status_code == 200


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For", "X-Forwarded-Proto", "Forwarded", "Via"]
)
async def test_an_open_gateway_serves_nobody_through_a_proxy(
    gateway: Served, store: KeyStore, header: str
) -> None:
    refused = await asked(gateway, **{header: "203.0.113.7"})
    assert (refused.status_code, code_of(refused)) == (403, "proxy_refused")
    secret, _ = await store.create("acme", [Scope.INFERENCE])
    assert (await asked(gateway, secret, **{header: "203.0.113.7"})).status_code == 200


async def test_open_on_purpose_it_still_has_only_names_of_its_host(
    newest_redis, group, tmp_path
) -> None:
    config = gateway_config(tmp_path, auth="none")
    async with served(config, newest_redis.url) as gateway:
        refused = await asked(gateway, Host="evil.example")
        assert (refused.status_code, code_of(refused)) == (403, "host_refused")
        # Its operator has let everyone in, and may do so through a proxy.
        proxied = {"X-Forwarded-For": "203.0.113.7"}
        assert (await asked(gateway, **proxied)).status_code == 200


async def test_a_session_is_as_good_as_its_key(
    gateway: Served, store: KeyStore, empty_redis
) -> None:
    secret, record = await store.create("acme", [Scope.INFERENCE])
    cookie = await store.open_session(secret)
    assert await store.open_session("tm-wrong") is None
    headers = {"Cookie": f"{auth.SESSION_COOKIE}={cookie}"}
    assert (await asked(gateway, **headers)).status_code == 200
    foreign = {**headers, "Origin": "https://evil.example"}
    assert code_of(await asked(gateway, **foreign)) == "origin_refused"
    (key,) = [key async for key in empty_redis.scan_iter("tm:session:*")]
    assert cookie not in key.decode()
    assert await empty_redis.pttl(key) > 0
    await store.revoke(record.id)
    assert (await asked(gateway, **headers)).status_code == 401


async def test_pages_that_are_named_may_call(newest_redis, group, tmp_path) -> None:
    page = "https://app.example"
    asks = {"Origin": page, "Access-Control-Request-Method": "POST"}
    config = gateway_config(tmp_path, cors_origins=(page,))
    async with served(config, newest_redis.url) as gateway:
        reply = await gateway.http.options(COMPLETIONS, headers=asks)
        assert reply.headers["access-control-allow-origin"] == page
        assert (await asked(gateway, Origin=page)).status_code == 200
    async with served(gateway_config(tmp_path), newest_redis.url) as gateway:
        reply = await gateway.http.options(COMPLETIONS, headers=asks)
        assert "access-control-allow-origin" not in reply.headers


# --- commands -------------------------------------------------------------------------
async def test_a_gateway_without_keys_stays_on_its_host(
    newest_redis, store: KeyStore
) -> None:
    beyond = GatewayConfig(host="0.0.0.0")
    with pytest.raises(ConfigError, match="tokenmill keys create"):
        await require_keys(beyond, newest_redis.url)
    await require_keys(GatewayConfig(host="0.0.0.0", auth="none"), newest_redis.url)
    await require_keys(GatewayConfig(), newest_redis.url)
    await store.create("acme", [Scope.INFERENCE])
    await require_keys(beyond, newest_redis.url)


def test_the_commands_make_list_and_revoke_keys(newest_redis) -> None:
    with redis.Redis.from_url(newest_redis.url) as client:
        client.flushall()
    app = typer.Typer()
    register_keys(app)

    def run(*arguments: str):
        given = ["keys", *arguments, "--url", newest_redis.url]
        return CliRunner().invoke(app, given, prog_name="tokenmill")

    made = run("create", "--tenant", "acme")
    assert (made.exit_code, made.stdout.count("\n")) == (0, 1), made.output
    assert made.stdout.startswith("tm-")
    assert "cannot be shown again" in made.stderr
    shown = json.loads(run("list", "--json").stdout)
    assert (shown["tenant"], shown["scopes"]) == (
        "acme",
        ["inference", "batch", "read"],
    )
    assert made.stdout.strip() not in run("list", "--json").stdout

    revoked = run("revoke", shown["id"])
    assert revoked.stdout == f"{shown['id']} of tenant acme is revoked\n"
    assert run("list", "--json").stdout == ""
    assert json.loads(run("list", "--json", "--all").stdout)["revoked_ms"] > 0
    wrong = run("revoke", "key-none")
    assert wrong.exit_code == 4
    assert "there is no key 'key-none'" in wrong.stderr


async def test_the_command_serves_until_it_is_told_to_end(
    newest_redis, group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is under way ends within the drain, and so does the process."""
    group.delay_s = 0.005
    pool = CommandPool(newest_redis.url, group)
    monkeypatch.setenv("TOKENMILL_GATEWAY_DRAIN_S", "0.3")
    process = await pool.start("gateway", "--port", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    address = (await process.stdout.readline()).decode().split()[1]
    body = {**BODY, "prompt": "w " * 4000, "max_tokens": 4000, "stream": True}
    async with (
        httpx.AsyncClient(base_url=address, timeout=60) as http,
        http.stream("POST", COMPLETIONS, json=body) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line async for line in lines if line]
    assert '"code":"shutting_down"' in rest[-1]
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert b'"event":"draining"' in err
    job_id = response.headers["x-tokenmill-job"]

    async def is_cancelled() -> bool:
        return await pool.state(job_id) == "cancelled"

    await wait_until(is_cancelled)
