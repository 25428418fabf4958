"""What callers do with a composition's gateway over HTTP, each with its own key."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import redis.asyncio

from tokenmill import Prompt, SyncClient
from tokenmill.shared.api_keys import KeyStore, Scope

from .composed import MODEL, Composition
from .waiting import wait_until_sync

TENANT = "me"
DEAD = f"tm:{{{MODEL}:0}}:dlq"


class Caller:
    """One key at the gateway, and which operations it has called.

    Args:
        whole: The composition.
        key: The key; None calls without one.
    """

    def __init__(self, whole: Composition, key: str | None) -> None:
        port = whole.services["gateway"].env["TOKENMILL_GATEWAY_PORT"]
        self.called: list[tuple[str, str]] = []
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=30,
            event_hooks={"response": [self._note]},
        )

    def _note(self, response: httpx.Response) -> None:
        request = response.request
        self.called.append((request.method, request.url.path))

    def ask(self, method: str, path: str, **options: Any) -> Any:
        """One request that succeeds; its JSON."""
        response = self.http.request(method, path, **options)
        assert response.is_success, (method, path, response.text)
        return response.json()

    def get(self, path: str, **options: Any) -> Any:
        return self.ask("GET", path, **options)

    def post(self, path: str, body: object = None) -> Any:
        return self.ask("POST", path, json=body)

    def first_event(self, path: str) -> str:
        """The first event of a stream, which the caller then leaves."""
        with self.http.stream("GET", path) as response:
            assert response.is_success, path
            return next(line for line in response.iter_lines() if "data" in line)


@dataclass
class Callers:
    """A user, someone who only looks, an administrator, and a browser."""

    user: Caller
    reader: Caller
    admin: Caller
    browser: Caller
    """Without a key: it has the reader's, to log in with."""
    reader_key: str

    def all(self) -> Sequence[Caller]:
        return (self.user, self.reader, self.admin, self.browser)


@contextmanager
def calling(whole: Composition) -> Iterator[Callers]:
    """Callers of the tenant of `whole.keys`, for the length of a block."""

    async def make() -> str:
        async with redis.asyncio.Redis.from_url(whole.url("gateway")) as client:
            key, _ = await KeyStore(client).create(TENANT, [Scope.READ])
            return key

    reader_key = whole.keys["read"] = asyncio.run(make())
    keys = (whole.keys["inference"], reader_key, whole.keys["admin"], None)
    with ExitStack() as stack:
        callers = [Caller(whole, key) for key in keys]
        for one in callers:
            stack.enter_context(one.http)
        yield Callers(*callers, reader_key)


def uncalled(document: dict[str, Any], callers: Sequence[Caller]) -> set[str]:
    """Operations of an OpenAPI document that none of them has called."""
    called = {one for caller in callers for one in caller.called}
    operations = {
        (way.upper(), path) for path, ways in document["paths"].items() for way in ways
    }

    def is_called(method: str, path: str) -> bool:
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))
        return any(m == method and re.fullmatch(pattern, p) for m, p in called)

    return {" ".join(one) for one in operations if not is_called(*one)}


def use_files_and_batches(user: Caller) -> None:
    """Batches' whole life, the runs that they are, and their files."""
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"line {number}", "max_tokens": 9},
        }
        for number in range(3)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    files = [
        user.ask(
            *("POST", "/v1/files"),
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", content)},
        )["id"]
        for _ in range(2)
    ]
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    first, second = (
        user.post("/v1/batches", {**asked, "input_file_id": file})["id"]
        for file in files
    )
    user.post(f"/v1/batches/{second}/cancel")
    whole = _settled(user, first)
    assert whole["status"] == "completed", whole
    assert whole["request_counts"]["completed"] == len(lines)
    assert _settled(user, second)["status"] in ("cancelled", "completed")
    output = user.http.get(f"/v1/files/{whole['output_file_id']}/content")
    assert len(output.text.splitlines()) == len(lines)
    assert user.get("/v1/batches", params={"limit": 1, "after": second})["data"]
    for order in ("asc", "desc"):
        page = user.get("/v1/files", params={"limit": 1, "order": order})
        more = {"limit": 1, "order": order, "after": page["data"][0]["id"]}
        assert user.get("/v1/files", params=more)["data"]
    user.get(f"/v1/files/{files[0]}")
    assert user.ask("DELETE", f"/v1/files/{files[0]}")["deleted"]
    run = user.get("/v1/bulk")["data"][0]["run"]
    user.get(f"/v1/bulk/{run}")
    user.post(f"/v1/bulk/{run}/cancel")


def _settled(user: Caller, batch: str) -> Any:
    def look() -> Any:
        found = user.get(f"/v1/batches/{batch}")
        ended = ("completed", "failed", "expired", "cancelled")
        return found if found["status"] in ended else None

    return wait_until_sync(look, every_s=0.25, what=f"batch {batch}")


def use_jobs(user: Caller) -> list[str]:
    """Jobs, their pages and their ends; returns their ids."""
    body = {"model": MODEL, "text": "to and fro"}
    ids = [user.post("/v1/jobs", body)["id"] for _ in range(3)]
    later = user.post("/v1/jobs", {**body, "delay_s": 3600})["id"]
    for job in ids:
        user.get(f"/v1/jobs/{job}", params={"wait": 20})
    assert user.first_event(f"/v1/jobs/{ids[0]}/stream")
    page = user.get("/v1/jobs", params={"limit": 2})
    more = {"limit": 2, "after": page["cursor"]}
    assert user.get("/v1/jobs", params=more)["data"]
    user.get("/v1/jobs", params={"state": "succeeded"})
    user.post(f"/v1/jobs/{later}/cancel")
    user.ask("DELETE", f"/v1/jobs/{ids[2]}")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    user.http.post("/v1/chat/completions", json=chat)  # echo has no template
    user.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2})
    assert user.get("/v1/models")["data"]
    user.get(f"/v1/models/{MODEL}")
    return ids


def use_dashboard(callers: Callers, jobs: Sequence[str]) -> None:
    """What the dashboard asks for, as one who looks and as an administrator."""
    for one in (callers.reader, callers.admin):
        for path in ("me", "snapshot", "history", "jobs", "dead"):
            assert one.get(f"/v1/admin/{path}")
        assert one.first_event("/v1/admin/events")
        one.get("/v1/admin/jobs", params={"state": "succeeded", "q": "echo"})
        assert one.get(f"/v1/admin/jobs/{jobs[0]}")
    assert callers.reader.get("/v1/usage")["data"]
    assert callers.reader.first_event(f"/v1/admin/jobs/{jobs[0]}/stream")
    callers.admin.post(f"/v1/admin/jobs/{jobs[0]}/cancel")
    run = callers.user.get("/v1/bulk")["data"][0]["run"]
    callers.admin.post(f"/v1/admin/runs/{run}/cancel")
    browser = callers.browser
    browser.post("/login", {"key": callers.reader_key})
    browser.get("/v1/admin/snapshot")
    browser.post("/logout")
    for path in ("/healthz", "/readyz"):
        browser.get(path)
    for path in ("/", "/dashboard", "/dashboard/", "/login"):
        assert browser.http.get(path).status_code < 500


def use_dead_letters(whole: Composition, admin: Caller) -> None:
    """One is requeued, one purged, as an administrator does it in the dashboard."""
    with SyncClient(whole.url("producer")) as mill:
        jobs = mill.submit_many(
            [Prompt("lost", model=MODEL, tenant=TENANT, delay_s=3600)] * 2
        )
        with whole.admin() as client:
            for job in jobs:
                letter = {"id": job.id, "reason": "lease_lost", "error": "{}"}
                client.xadd(DEAD, letter)
        again, gone = (job.id for job in jobs)
        found = admin.post("/v1/admin/dead/requeue", {"ids": [again]})["data"]
        assert len(found) == 1
        assert admin.post("/v1/admin/dead/purge", {"ids": [gone]}) == {"purged": 1}
        admin.post("/v1/admin/dead/purge", {"all": True})
        for job in jobs:
            job.cancel()


def revoke_reader(whole: Composition) -> None:
    """Ends that key, as `tokenmill keys list` and `revoke` do."""

    async def end() -> None:
        async with redis.asyncio.Redis.from_url(whole.url("gateway")) as client:
            store = KeyStore(client)
            records = await store.records()
            (mine,) = [one for one in records if one.scopes == (Scope.READ,)]
            await store.revoke(mine.id)

    asyncio.run(end())
