"""Logging in with a key, what a session may do, and the dashboard's pages."""

import asyncio
import re
from urllib.parse import parse_qs, urlsplit

import pytest

from tokenmill.producer.gateway import auth, leaving
from tokenmill.shared.api_keys import Scope

pytest_plugins = "support.keyed_gateway"

COOKIE = "tokenmill_session"


# --- login ------------------------------------------------------------
def secret_of(headers: dict[str, str]) -> str:
    return headers["Authorization"].removeprefix("Bearer ")


async def test_login_gives_a_cookie_that_acts_as_the_key(gateway, keys) -> None:
    reply = await gateway.http.post("/login", json={"key": secret_of(keys["acme"])})
    assert reply.json() == {"tenant": "acme", "scopes": ["read"]}
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie
    me = (await gateway.http.get("/v1/admin/me")).json()
    assert (me["tenant"], me["is_admin"], me["auth"]) == ("acme", False, "keys")
    value = gateway.http.cookies[COOKIE]
    stored = [
        (key, await gateway.owner.redis.get(key))
        async for key in gateway.owner.redis.scan_iter("tm:session:*")
    ]
    assert len(stored) == 1
    assert value.encode() not in b"".join(part for pair in stored for part in pair)
    assert await gateway.owner.redis.ttl(stored[0][0]) > 0
    assert (await gateway.http.post("/logout")).json() == {"logged_out": True}
    assert not gateway.http.cookies
    copied = {"Cookie": f"{COOKIE}={value}"}
    reply = await gateway.http.get("/v1/admin/me", headers=copied)
    assert reply.status_code == 401


async def test_the_cookie_is_secure_where_the_page_came_by_https(gateway, keys) -> None:
    """TLS ends at a proxy; what tells is the origin of the page, which is checked."""
    site = {"Origin": gateway.url.rstrip("/").replace("http://", "https://")}
    login = {"key": secret_of(keys["acme"])}
    reply = await gateway.http.post("/login", json=login, headers=site)
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith(f"__Host-{COOKIE}=")
    assert "Secure" in cookie
    assert "Path=/" in cookie
    assert "Domain" not in cookie
    session = {**site, "Cookie": cookie.partition(";")[0]}
    assert (await gateway.http.get("/v1/admin/me", headers=session)).status_code == 200
    reply = await gateway.http.post("/logout", headers=session)
    assert f'__Host-{COOKIE}=""' in reply.headers["set-cookie"]
    assert "Secure" in reply.headers["set-cookie"]
    assert (await gateway.http.get("/v1/admin/me", headers=session)).status_code == 401


async def test_what_is_watched_ends_with_the_session_or_the_key(
    gateway, keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(auth, "KEY_AGE_S", 0.0)
    store = gateway.owner.keys.store
    secret, record = await store.create("acme", [Scope.READ])
    cookie = await store.open_session(secret)
    session = {"Cookie": f"{COOKIE}={cookie}"}

    async def watch(headers: dict[str, str], *, by_logout: bool) -> None:
        path = "/v1/admin/events"
        async with gateway.http.stream("GET", path, headers=headers) as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            await anext(lines)
            if by_logout:
                await gateway.http.post("/logout", headers=session)
            else:
                await store.revoke(record.id)
            async with asyncio.timeout(60):
                async for _ in lines:
                    pass

    await watch(session, by_logout=True)
    await watch({"Authorization": f"Bearer {secret}"}, by_logout=False)


async def test_pages_of_other_sites_can_do_nothing_with_a_session(
    gateway, shard, keys
) -> None:
    foreign = {"Origin": "https://evil.example"}
    login = {"key": secret_of(keys["acme-user"])}
    reply = await gateway.http.post("/login", json=login, headers=foreign)
    assert reply.status_code == 403
    await gateway.http.post("/login", json=login)
    job_id = await shard.enqueue(tenant="acme")
    path = f"/v1/admin/jobs/{job_id}/cancel"
    assert (await gateway.http.post(path, headers=foreign)).status_code == 403
    assert (await gateway.http.post("/logout", headers=foreign)).status_code == 403
    assert await shard.state(job_id) == "queued"
    site = {"Origin": gateway.url.rstrip("/")}
    assert (await gateway.http.post(path, headers=site)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"key":"tm-wrong"}', 401),
        (b'{"key":1}', 400),
        (b"no json", 400),
        (b'{"key":"' + b"x" * 5000 + b'"}', 413),
    ],
)
async def test_a_login_that_cannot_be_says_why(gateway, body, status) -> None:
    reply = await gateway.http.post("/login", content=body)
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    assert "set-cookie" not in reply.headers


# --- pages ------------------------------------------------------------
async def test_pages_lead_to_the_login_and_hold_nothing_of_the_pool(gateway) -> None:
    reply = await gateway.http.get("/dashboard/jobs")
    assert reply.status_code == 303
    assert reply.headers["location"] == "/login?next=/dashboard/jobs"
    reply = await gateway.http.get("/dashboard/jobs?state=failed&q=a b")
    wanted = parse_qs(urlsplit(reply.headers["location"]).query)
    assert wanted == {"next": ["/dashboard/jobs?state=failed&q=a%20b"]}
    login = await gateway.http.get("/login")
    assert login.status_code == 200
    policy = login.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    for text in (login.text, (await gateway.http.get("/dashboard/")).text):
        assert "<style" not in text
        assert " style=" not in text
        assert not re.search(r"\son\w+=", text)
    script = await gateway.http.get("/dashboard/static/js/main.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    tag = {"If-None-Match": script.headers["etag"]}
    again = await gateway.http.get("/dashboard/static/js/main.js", headers=tag)
    assert again.status_code == 304
    for odd in ("../pages.py", "..%2fpages.py", "js", "nothing.js"):
        reply = await gateway.http.get(f"/dashboard/static/{odd}")
        assert reply.status_code in (303, 404), odd


async def test_every_answer_is_in_the_openapi_document(gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    paths = [path for path in document["paths"] if path.startswith("/v1/admin")]
    assert len(paths) == 12
    for path in paths:
        for operation in document["paths"][path].values():
            content = operation["responses"]["200"]["content"]
            assert all(one["schema"] for one in content.values()), path
            assert "403" in operation["responses"]
