"""/v1/jobs: submit, look, wait, list, cancel; each tenant sees its own."""

import asyncio
import time

import pytest
from support.served import gateway_config, served
from support.waiting import wait_until

from tokenmill.shared.api_keys import KeyStore, Scope
from tokenmill.shared.messages import DEFAULT_MODEL

BODY = {"text": "one two three", "sampling": {"max_tokens": 8, "seed": 5}}


@pytest.fixture
async def gateway(newest_redis, group, tmp_path):
    async with served(gateway_config(tmp_path), newest_redis.url) as made:
        yield made


async def submitted(gateway, **fields) -> str:
    reply = await gateway.http.post("/v1/jobs", json={**BODY, **fields})
    assert reply.status_code == 202, reply.text
    return reply.json()["id"]


async def test_a_job_is_submitted_waited_for_and_shown(gateway) -> None:
    reply = await gateway.http.post("/v1/jobs", json={**BODY, "priority": -3})
    assert reply.status_code == 202
    job_id = reply.json()["id"]
    assert reply.headers["location"] == f"/v1/jobs/{job_id}"

    reply = await gateway.http.get(f"/v1/jobs/{job_id}", params={"wait": 30})
    job = reply.json()
    assert job["state"] == "succeeded"
    assert job["output"]["text"] == "one two three"
    assert job["usage"]["completion_tokens"] == 3
    assert job["priority"] == -3
    assert job["seed"] == "5"
    assert job["enqueued_ms"] <= job["started_ms"] <= job["finished_ms"]
    assert job["error"] is None


async def test_the_wait_ends_in_time_without_the_job(gateway, group) -> None:
    await group.pause()
    job_id = await submitted(gateway)
    begun = time.monotonic()
    reply = await gateway.http.get(f"/v1/jobs/{job_id}", params={"wait": 0.2})
    assert 0.2 <= time.monotonic() - begun < 30
    assert reply.json()["state"] == "queued"
    assert reply.json()["output"] is None


async def test_a_repeat_finds_the_job_and_another_request_is_refused(gateway) -> None:
    headers = {"Idempotency-Key": "order-17"}
    first = await gateway.http.post("/v1/jobs", json=BODY, headers=headers)
    again = await gateway.http.post("/v1/jobs", json=BODY, headers=headers)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    other = {**BODY, "text": "else", "idempotency_key": "order-17"}
    refused = await gateway.http.post("/v1/jobs", json=other)
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "idempotency_conflict"


async def test_two_words_for_one_field_must_agree(gateway, group) -> None:
    two = {**BODY, "class": "bulk", "job_class": "interactive"}
    refused = await gateway.http.post("/v1/jobs", json=two)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "class"
    same = {**BODY, "class": "bulk", "job_class": "bulk"}
    assert (await gateway.http.post("/v1/jobs", json=same)).status_code == 202


async def test_options_come_as_headers_or_fields(gateway, group) -> None:
    await group.pause()
    headers = {
        "X-Tokenmill-Priority": "7",
        "X-Tokenmill-Class": "bulk",
        "X-Tokenmill-Deadline": "60",
        "X-Tokenmill-Tenant": "acme",
    }
    reply = await gateway.http.post(
        "/v1/jobs", json={**BODY, "priority": 1}, headers=headers
    )
    job = reply.json()
    assert (job["priority"], job["job_class"], job["tenant"]) == (7, "bulk", "acme")
    assert 0 < job["deadline_ms"] - job["enqueued_ms"] <= 60_000

    delayed = await gateway.http.post("/v1/jobs", json={**BODY, "delay_s": 60})
    assert delayed.json()["state"] == "delayed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": ""}, "text"),
        ({"text": "a", "messages": []}, "text"),
        ({"text": "a", "sampling": {"temperature": 9}}, "sampling.temperature"),
        ({"text": "a", "sampling": {"tempo": 9}}, "sampling.tempo"),
        ({"text": "a", "colour": 1}, "colour"),
        ({"text": "a", "priority": 1000}, "priority"),
        ({"text": "a", "priority": "high"}, "priority"),
        ({"text": "a", "not_before": "tomorrow"}, "not_before"),
        ({"text": "a", "refuse_late": True}, "refuse_late"),
        ({"text": "a", "wait_for_worker": "yes"}, "wait_for_worker"),
    ],
)
async def test_a_wrong_field_is_named(gateway, fields, param) -> None:
    reply = await gateway.http.post("/v1/jobs", json=fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_what_is_no_json_is_refused(gateway) -> None:
    for body in (b"", b"{", b"[]", b"\xff", b"[" * 10_000):
        reply = await gateway.http.post("/v1/jobs", content=body)
        assert reply.status_code == 400, body[:10]


async def test_an_unknown_model_is_refused_unless_it_may_wait(gateway) -> None:
    reply = await gateway.http.post("/v1/jobs", json={**BODY, "model": "other"})
    assert reply.status_code == 404
    job_id = await submitted(gateway, model="other", wait_for_worker=True)
    assert job_id.startswith("other.0.")


async def test_a_waiting_job_is_cancelled(gateway, group) -> None:
    await group.pause()
    job_id = await submitted(gateway)
    reply = await gateway.http.delete(f"/v1/jobs/{job_id}")
    assert reply.json() == {"id": job_id, "object": "job", "state": "cancelled"}
    job = (await gateway.http.get(f"/v1/jobs/{job_id}")).json()
    assert job["state"] == "cancelled"
    assert job["error"]["code"] == "cancelled"
    again = await gateway.http.post(f"/v1/jobs/{job_id}/cancel")
    assert again.json()["state"] == "cancelled"


async def test_the_list_is_paged_newest_first_and_filtered(gateway, group) -> None:
    await group.pause()
    ids = [await submitted(gateway, text=f"job {i}") for i in range(7)]
    await gateway.http.delete(f"/v1/jobs/{ids[2]}")
    await submitted(gateway, tenant="other")

    seen: list[str] = []
    params: dict[str, object] = {"limit": 3}
    while True:
        page = (await gateway.http.get("/v1/jobs", params=params)).json()
        assert len(page["data"]) <= 3
        seen += [job["id"] for job in page["data"]]
        if page["cursor"] is None:
            break
        params["after"] = page["cursor"]
    assert sorted(seen) == sorted(ids)  # those of one millisecond in any order
    assert len(seen) == 7

    params = {"state": "cancelled"}
    page = (await gateway.http.get("/v1/jobs", params=params)).json()
    assert [job["id"] for job in page["data"]] == [ids[2]]
    assert (await gateway.http.get("/v1/jobs?after=x")).status_code == 400


async def test_jobs_of_one_millisecond_are_listed_once_each(
    gateway, group, monkeypatch
) -> None:
    """Pages smaller than the number of jobs of one time."""
    from tokenmill.producer import job_pages

    monkeypatch.setattr(job_pages, "_PAGE", 2)
    await group.pause()
    ids = [await submitted(gateway) for _ in range(9)]
    recent = group.keys.recent
    await group.redis.zadd(recent, dict.fromkeys(ids, 1000), xx=True)
    seen, after = [], None
    while True:
        params = {"limit": 3} | ({} if after is None else {"after": after})
        page = (await gateway.http.get("/v1/jobs", params=params)).json()
        seen += [job["id"] for job in page["data"]]
        after = page["cursor"]
        if after is None:
            break
    assert sorted(seen) == sorted(ids)


async def test_jobs_of_another_tenant_do_not_exist(
    newest_redis, empty_redis, group, tmp_path
) -> None:
    keys = KeyStore(empty_redis)
    secrets = {
        name: (await keys.create(name, [Scope.INFERENCE]))[0] for name in ("a", "b")
    }
    boss, _ = await keys.create("boss", [Scope.ADMIN])
    looker, _ = await keys.create("a", [Scope.READ])

    def headers(secret: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {secret}"}

    async with served(gateway_config(tmp_path), newest_redis.url) as gateway:
        http = gateway.http
        assert (await http.post("/v1/jobs", json=BODY)).status_code == 401
        reply = await http.post("/v1/jobs", json=BODY, headers=headers(secrets["a"]))
        job = f"/v1/jobs/{reply.json()['id']}"
        for method, path in (
            ("GET", job),
            ("GET", f"{job}?wait=1"),
            ("GET", f"{job}/stream"),
            ("DELETE", job),
            ("POST", f"{job}/cancel"),
        ):
            reply = await http.request(method, path, headers=headers(secrets["b"]))
            assert reply.status_code == 404, (method, path, reply.text)
            assert reply.json()["error"]["code"] == "unknown_job"
        assert (await http.get(job, headers=headers(boss))).status_code == 200
        listed = await http.get("/v1/jobs", headers=headers(secrets["b"]))
        assert listed.json()["data"] == []
        refused = await http.post(
            "/v1/jobs", json={**BODY, "tenant": "b"}, headers=headers(secrets["a"])
        )
        assert refused.status_code == 403
        refused = await http.post("/v1/jobs", json=BODY, headers=headers(looker))
        assert refused.status_code == 403


async def test_an_id_that_cannot_be_one_is_unknown(gateway) -> None:
    for job_id in ("nonsense", f"{DEFAULT_MODEL}.0.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"):
        reply = await gateway.http.get(f"/v1/jobs/{job_id}")
        assert reply.status_code == 404


async def test_a_long_poll_of_a_client_that_leaves_costs_nothing(
    gateway, group
) -> None:
    await group.pause()
    job_id = await submitted(gateway)
    poll = asyncio.create_task(gateway.http.get(f"/v1/jobs/{job_id}?wait=50"))
    session = gateway.owner.client.session

    async def watched() -> int:
        channel = group.keys.wake(job_id)
        return dict(await group.redis.pubsub_numsub(channel))[channel.encode()]

    await wait_until(watched)
    poll.cancel()

    async def left() -> bool:
        return not await watched()

    await wait_until(left, what="the end of the subscription")
    assert session is not None
