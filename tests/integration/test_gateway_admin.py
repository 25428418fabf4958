"""The dashboard's API: a tenant sees its own, an administrator all; one look."""

import asyncio
import json
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.shard_client import Shard
from support.waiting import wait_until

from tokenmill.producer.gateway import recent_jobs
from tokenmill.producer.gateway.auth import TENANT_HEADER, Caller
from tokenmill.producer.gateway.live_views import LiveViews
from tokenmill.producer.newest_jobs import NewestJobs
from tokenmill.shared.api_keys import Scope
from tokenmill.shared.bulk.keys import new_run_id
from tokenmill.shared.bulk.messages import RunSpec
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.keys import HISTORY
from tokenmill.shared.watch.snapshot import HistorySample

pytest_plugins = "support.keyed_gateway"

SECRET = "a secret of globex"


async def enqueue(shard: Shard, tenant: str, text: str = "hello") -> str:
    payload = msgspec.json.encode({"text": text})
    return await shard.enqueue(tenant=tenant, payload=payload)


async def bury(shard: Shard, tenant: str) -> str:
    job_id = await enqueue(shard, tenant)
    epoch = await shard.run_again(job_id)
    assert await shard.fail(job_id, epoch, max_attempts=1) == "failed"
    return job_id


async def begin_run(client, tenant: str) -> RunStore:
    run = RunStore(client, new_run_id())
    await run.create(RunSpec(kind="run", tenant=tenant))
    return run


# --- who sees what ------------------------------------------------------------
async def test_a_tenant_is_shown_its_own_jobs_and_an_administrator_all(
    gateway, shard, keys
) -> None:
    mine, other = await enqueue(shard, "acme"), await enqueue(shard, "globex")

    async def listed(key: str, **params: str) -> list[str]:
        reply = await gateway.http.get(
            "/v1/admin/jobs", headers=keys[key], params=params
        )
        assert reply.status_code == 200, reply.text
        return [job["id"] for job in reply.json()["data"]]

    assert await listed("acme") == [mine]
    assert await listed("globex") == [other]
    assert set(await listed("admin")) == {mine, other}
    assert await listed("acme", q=other[-8:]) == []
    assert await listed("admin", q=other[-8:]) == [other]
    assert await listed("admin", state="running") == []


@pytest.mark.parametrize("way", ["", "/stream", "/cancel"])
async def test_a_job_of_another_tenant_is_as_if_it_were_not(
    gateway, shard, keys, way
) -> None:
    job_id = await enqueue(shard, "globex", SECRET)
    method = "POST" if way == "/cancel" else "GET"
    reply = await gateway.http.request(
        method, f"/v1/admin/jobs/{job_id}{way}", headers=keys["acme-user"]
    )
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_job"
    assert SECRET not in reply.text
    assert await shard.state(job_id) == "queued"


async def test_a_prompt_is_shown_to_its_own_tenant_and_to_nobody_else(
    gateway, shard, keys
) -> None:
    job_id = await enqueue(shard, "globex", SECRET)
    path = f"/v1/admin/jobs/{job_id}"
    own = await gateway.http.get(path, headers=keys["globex"])
    assert own.json()["input"] == SECRET
    admin = await gateway.http.get(path, headers=keys["admin"])
    assert admin.json()["job"]["tenant"] == "globex"
    assert admin.json()["input"] is None
    assert SECRET not in admin.text
    acting = {**keys["admin"], TENANT_HEADER: "globex"}
    reply = await gateway.http.get(path, headers=acting)
    assert reply.json()["job"]["tenant"] == "globex"
    assert SECRET not in reply.text  # acting for a tenant is not to be it
    assert own.json()["seed"] == str(2**63 - 1)  # more than a browser's numbers hold


async def test_live_views_name_no_other_tenant(gateway, shard, keys) -> None:
    await enqueue(shard, "acme")
    await enqueue(shard, "globex")
    await bury(shard, "globex")
    await begin_run(shard.client, "globex")

    async def view(key: str) -> dict:
        reply = await gateway.http.get("/v1/admin/snapshot", headers=keys[key])
        assert reply.status_code == 200, reply.text
        return reply.json()

    mine = await view("acme")
    assert "globex" not in json.dumps(mine)
    assert [one["name"] for one in mine["tenants"]] == ["acme"]
    assert [job["tenant"] for job in mine["recent"]] == ["acme"]
    assert (mine["processes"], mine["runs"], mine["dead_letters"]) == ([], [], None)
    assert mine["waiting_jobs"] == 2  # a sum, which names nobody
    every = await view("admin")
    assert {one["name"] for one in every["tenants"]} == {"acme", "globex"}
    assert [run["tenant"] for run in every["runs"]] == ["globex"]
    assert every["dead_letters"] == 1
    assert every["buckets"] == ["128", "512", "2048", "8192", "beyond"]


async def test_dead_letters_are_listed_by_tenant_and_acted_on_by_administrators(
    gateway, shard, keys
) -> None:
    mine, other = await bury(shard, "acme"), await bury(shard, "globex")

    async def listed(key: str) -> list[str]:
        reply = await gateway.http.get("/v1/admin/dead", headers=keys[key])
        return [letter["id"] for letter in reply.json()["data"]]

    async def post(key: str, act: str, body: object) -> tuple[int, dict]:
        reply = await gateway.http.post(
            f"/v1/admin/dead/{act}", headers=keys[key], json=body
        )
        return reply.status_code, reply.json()

    assert await listed("acme") == [mine]
    assert await listed("admin") == [other, mine]
    for act in ("requeue", "purge"):
        assert (await post("acme-user", act, {"ids": [mine]}))[0] == 403
    status, made = await post("admin", "requeue", {"ids": [mine]})
    assert status == 200
    again = made["data"][0]["job"]
    assert await shard.state(again) == "queued"
    assert (await post("admin", "purge", {"all": True}))[1] == {"purged": 2}
    assert await listed("admin") == []
    assert (await post("admin", "purge", {"ids": ["tiny.0." + "0" * 20]}))[0] == 404


@pytest.mark.parametrize("body", [b"{}", b'{"ids":["x"],"all":true}', b"[", b'{"i":1}'])
async def test_what_names_no_letters_is_refused(gateway, shard, keys, body) -> None:
    await bury(shard, "acme")
    reply = await gateway.http.post(
        "/v1/admin/dead/purge", headers=keys["admin"], content=body
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    left = await gateway.http.get("/v1/admin/dead", headers=keys["admin"])
    assert left.json()["total"] == 1


# --- acts ------------------------------------------------------------
async def test_a_job_is_cancelled_by_who_may_submit(gateway, shard, keys) -> None:
    job_id = await enqueue(shard, "acme")
    path = f"/v1/admin/jobs/{job_id}"
    looked = await gateway.http.get(path, headers=keys["acme"])
    assert looked.json()["may_cancel"] is False
    refused = await gateway.http.post(f"{path}/cancel", headers=keys["acme"])
    assert refused.status_code == 403
    assert await shard.state(job_id) == "queued"
    looked = await gateway.http.get(path, headers=keys["acme-user"])
    assert looked.json()["may_cancel"] is True
    done = await gateway.http.post(f"{path}/cancel", headers=keys["acme-user"])
    assert done.json() == {"status": "cancelled"}
    ended = (await gateway.http.get(path, headers=keys["acme-user"])).json()
    assert ended["job"]["state"] == "cancelled"
    assert ended["error"]["code"] == "cancelled"
    assert ended["may_cancel"] is False


async def test_a_run_is_cancelled_by_its_tenant_with_the_scope_batch(
    gateway, shard, keys
) -> None:
    run = await begin_run(shard.client, "acme")
    other = await begin_run(shard.client, "globex")

    async def cancel(key: str, run_id: str) -> int:
        path = f"/v1/admin/runs/{run_id}/cancel"
        return (await gateway.http.post(path, headers=keys[key])).status_code

    assert await cancel("acme", run.run_id) == 403
    assert await cancel("acme-user", other.run_id) == 404
    assert await cancel("acme-user", "0000000000") == 404
    assert await cancel("acme-user", run.run_id) == 200
    assert (await run.view()).state in ("cancelling", "cancelled")
    assert (await other.view()).state == "open"


async def test_a_jobs_text_is_followed_to_its_end_and_from_where_one_was(
    gateway, shard, keys
) -> None:
    job_id = await enqueue(shard, "acme")
    epoch = await shard.run_again(job_id)
    for seq in range(1, 4):
        assert await shard.emit(job_id, epoch, seq, seq - 1) == "written"
    await shard.finish(job_id, epoch)
    path = f"/v1/admin/jobs/{job_id}/stream"
    reply = await gateway.http.get(path, headers=keys["acme"])
    blocks = [block for block in reply.text.split("\n\n") if "data:" in block]
    assert sum('"text":"x"' in block for block in blocks) == 3
    assert "event: end" in blocks[-1]
    event_id = blocks[0].partition("id: ")[2].partition("\n")[0]
    rest = await gateway.http.get(
        path, headers={**keys["acme"], "Last-Event-ID": event_id}
    )
    assert rest.text.count('"text":"x"') == 2


async def test_history_is_what_the_janitor_noted(gateway, shard, keys) -> None:
    for at in (1000, 2000):
        sample = msgspec.json.encode(HistorySample(at_ms=at, tokens_per_s=at / 10))
        await shard.client.xadd(HISTORY, {"s": sample})
    reply = await gateway.http.get("/v1/admin/history", headers=keys["acme"])
    assert [one["at_ms"] for one in reply.json()["data"]] == [1000, 2000]
    assert reply.json()["data"][1]["tokens_per_s"] == 200.0


async def test_a_key_without_the_scope_read_sees_nothing(gateway, keys) -> None:
    me = await gateway.http.get("/v1/admin/me", headers=keys["submitter"])
    assert me.json()["scopes"] == ["inference"]  # for its playground
    assert (await gateway.http.get("/v1/admin/me")).status_code == 401
    for path in ("snapshot", "events", "history", "jobs", "dead"):
        reply = await gateway.http.get(f"/v1/admin/{path}", headers=keys["submitter"])
        assert reply.status_code == 403, path
        assert (await gateway.http.get(f"/v1/admin/{path}")).status_code == 401


async def num_reads(shard) -> int:
    stats = await shard.client.info("commandstats")
    names = ("cmdstat_hgetall", "cmdstat_hget")
    return sum(stats.get(name, {}).get("calls", 0) for name in names)


async def test_a_small_tenant_is_watched_at_the_cost_of_what_is_new(
    gateway, shard
) -> None:
    old = await enqueue(shard, "acme")
    for _ in range(100):
        await enqueue(shard, "globex")
    newest = NewestJobs(gateway.owner.client, 2)
    found = await newest.look({"acme"})
    assert [job.id for job in found["acme"]] == [old]

    new = await enqueue(shard, "acme")
    await enqueue(shard, "globex")
    await shard.run_again(old)
    before = await num_reads(shard)
    found = await newest.look({"acme"})
    assert [job.id for job in found["acme"]] == [new, old]
    assert [job.state for job in found["acme"]] == ["queued", "running"]
    assert await num_reads(shard) - before < 20  # and not one for each job of others

    third = await enqueue(shard, "acme")
    found = await newest.look({"acme", "globex"})  # who comes later sees all as well
    assert [job.id for job in found["acme"]] == [third, new]
    assert {job.tenant for job in found["globex"]} == {"globex"}
    assert len(found["globex"]) == 2
    assert await newest.look(()) == {}


async def test_asking_for_snapshots_again_and_again_reads_no_jobs_of_others(
    gateway, shard, keys, monkeypatch
) -> None:
    async def recent(key: str) -> list[str]:
        reply = await gateway.http.get("/v1/admin/snapshot", headers=keys[key])
        return [job["id"] for job in reply.json()["recent"]]

    mine = await enqueue(shard, "acme")
    for _ in range(200):
        await enqueue(shard, "globex")
    assert await recent("acme") == [mine]
    assert len(await recent("admin")) == recent_jobs.MOST
    before = await num_reads(shard)
    for _ in range(5):
        assert await recent("acme") == [mine]
    assert await num_reads(shard) - before < 300  # and not 200 each time

    monkeypatch.setattr(recent_jobs, "FRESH_S", 0.0)
    new = await enqueue(shard, "acme")
    before = await num_reads(shard)
    assert await recent("acme") == [new, mine]
    assert (await recent("admin"))[0] == new
    assert await num_reads(shard) - before < 150
    monkeypatch.setattr(recent_jobs, "FORGET_S", 0.0)  # long after, all is found anew
    assert await recent("acme") == [new, mine]


# --- one look for all ------------------------------------------------------------
@asynccontextmanager
async def watching(views, caller: Caller):
    """Counts the views that one viewer gets."""
    got: list[bytes] = []

    async def follow() -> None:
        async for chunk in views.watch(caller):
            got.append(chunk)  # noqa: PERF401 - read while it grows

    task = asyncio.create_task(follow())
    try:
        yield got
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_many_viewers_share_one_look_and_without_any_there_is_none(
    gateway, shard
) -> None:
    views = LiveViews(gateway.owner)
    work = asyncio.create_task(views.run())
    admin = Caller(tenant="ops", scopes=frozenset({Scope.ADMIN}), key_id="k")
    acme = Caller(tenant="acme", scopes=frozenset({Scope.READ}), key_id="k")
    try:
        assert views.looks == 0
        async with (
            watching(views, admin) as first,
            watching(views, admin) as second,
        ):
            async with watching(views, acme) as third:
                await wait_until(lambda: min(map(len, (first, second, third))) >= 2)
                assert views.viewers == 3
                assert max(map(len, (first, second, third))) <= views.looks + 1
                assert first[0] is second[0]  # the very same bytes
                assert third[0] != first[0]
            # Or it would be an old view that acme sees first when it comes back.
            await wait_until(lambda: "acme" not in views._current, what="a look")
        assert views.viewers == 0
        await wait_until(lambda: views.is_resting, what="the end of looks")
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
