"""A gateway is killed at its work: streams and batches go on, nothing comes twice."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.pools import UpProcess, up
from support.served import gateway_config, served
from support.servers import free_port
from support.waiting import ticks, wait_until, wait_until_sync

SETTINGS = {"TOKENMILL_GATEWAY_BATCH_LEASE_S": "1.5"}
NUM_LINES = 1500
"""More than are in the pool at a time..."""
LENGTH = 20
"""...and each takes long enough for two gateways to be killed before the last one."""
NUM_TOKENS = 2000
"""Of the job whose stream is read: seconds."""


class GatewayProcess:
    """`tokenmill gateway` as a child."""

    def __init__(self, pool: UpProcess, name: str) -> None:
        self.port = free_port()
        self.output = pool.directory / f"{name}.out"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenmill", "gateway"),
                    *("--port", str(self.port)),
                ],
                env={**pool.env, **SETTINGS},
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=pool.directory,
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.text
            try:
                with httpx.Client(trust_env=False) as http:
                    return http.get(f"{self.url}/healthz").status_code == 200
            except httpx.TransportError:
                return False

        wait_until_sync(ready, what=f"the gateway\n{self.text}")

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    directory: Path = tmp_path_factory.mktemp("pool")
    with up(directory, engine="echo:3", janitor=True) as made:
        yield made


@pytest.fixture
def gateways(pool) -> Iterator[list[GatewayProcess]]:
    """Two to be killed, on the same files."""
    made = [GatewayProcess(pool, name) for name in ("one", "two")]
    try:
        for gateway in made:
            gateway.wait_ready()
        yield made
    except BaseException:
        for gateway in made:
            sys.stdout.write(f"--- {gateway.output.name}\n{gateway.text}\n")
        raise
    finally:
        for gateway in made:
            gateway.end()


def line(number: int) -> str:
    body = {
        "model": "echo",
        "prompt": f"number {number}",
        "max_tokens": LENGTH,
        "ignore_eos": True,
    }
    return json.dumps(
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body,
        }
    )


async def test_batches_and_streams_survive_the_gateways_that_serve_them(
    pool, gateways
) -> None:
    """Whoever drives the batch is killed, twice; a reader moves on each time."""
    alive = list(gateways)
    async with alive[0].http() as http:
        batch_id = await _begin_batch(http)
        sampling = {"max_tokens": NUM_TOKENS, "n": 2, "ignore_eos": True}
        asked = {"text": "abc ", "sampling": sampling, "model": "echo"}
        job_id = (await http.post("/v1/jobs", json=asked)).json()["id"]
    urls = [gateway.url for gateway in gateways]
    reading = asyncio.create_task(_read(urls, job_id))

    num_done = 0
    for _ in range(2):
        driver, num_done = await _driver(alive, batch_id, num_done + 1)
        driver.kill()
        alive.remove(driver)
    async with served(gateway_config(pool.directory), pool.url) as last:
        urls.append(last.url)
        await _check_batch(last.http, batch_id)
        _check_stream(await reading)
    assert not list((pool.directory / "files").rglob(batch_id))


async def _begin_batch(http: httpx.AsyncClient) -> str:
    content = "\n".join(line(i) for i in range(NUM_LINES))
    file = {"file": ("in.jsonl", content)}
    uploaded = await http.post("/v1/files", files=file, data={"purpose": "batch"})
    asked = {
        "input_file_id": uploaded.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    return (await http.post("/v1/batches", json=asked)).json()["id"]


async def _driver(
    alive: list[GatewayProcess], batch_id: str, least: int
) -> tuple[GatewayProcess, int]:
    """The gateway that works on the batch by its log, once so many lines are done."""
    async with alive[0].http() as http:
        found: list[GatewayProcess] = []
        num_done = 0

        async def far_enough() -> bool:
            nonlocal num_done
            batch = (await http.get(f"/v1/batches/{batch_id}")).json()
            assert batch["status"] in ("validating", "in_progress"), batch
            num_done = batch["request_counts"]["completed"]
            found[:] = [gateway for gateway in alive if _holds(gateway, batch_id)]
            # While one takes over from another, both may seem to have it.
            return len(found) == 1 and num_done >= least

        await wait_until(far_enough, every_s=0.05, what=f"{least} lines")
    return found[0], num_done


def _holds(gateway: GatewayProcess, batch_id: str) -> bool:
    told = [text for text in gateway.text.splitlines() if batch_id in text]
    begun = [text for text in told if '"batch_begun"' in text]
    left = [t for t in told if re.search('"batch_(lost|put_off|ended)"', t)]
    return len(begun) > len(left)


async def _check_batch(http: httpx.AsyncClient, batch_id: str) -> None:
    found: list[dict] = []

    async def ended() -> bool:
        found.append((await http.get(f"/v1/batches/{batch_id}")).json())
        return found[-1]["status"] not in ("validating", "in_progress", "finalizing")

    await wait_until(ended, timeout_s=150, every_s=0.1, what="the end of the batch")
    done = found[-1]
    assert done["status"] == "completed", done
    counts = {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert done["request_counts"] == counts
    content = await http.get(f"/v1/files/{done['output_file_id']}/content")
    lines = [json.loads(text) for text in content.text.splitlines()]
    ids = [one["custom_id"] for one in lines]
    assert sorted(ids) == sorted(f"r{i}" for i in range(NUM_LINES))
    for one in lines:
        text = one["response"]["body"]["choices"][0]["text"]
        assert text == (f"number {one['custom_id'][1:]}" * LENGTH)[:LENGTH]


async def _read(urls: list[str], job_id: str) -> list[tuple[str, dict]]:
    """Reads a job's stream to its end; where a gateway breaks off, at the next one."""
    found: list[tuple[str, dict]] = []
    async for _ in ticks(0.05):
        url, last = urls[-1], found[-1][0] if found else None
        try:
            async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
                async for event in _events(http, f"{url}/v1/jobs/{job_id}", last):
                    found.append(event)  # noqa: PERF401 - it may break off
        except httpx.TransportError:
            urls.insert(0, urls.pop())
        if found and "state" in found[-1][1]:
            break
    return found


async def _events(http: httpx.AsyncClient, job: str, last: str | None):
    headers = {} if last is None else {"Last-Event-ID": last}
    async with http.stream("GET", f"{job}/stream", headers=headers) as response:
        assert response.status_code == 200
        event_id = ""
        async for text in response.aiter_lines():
            if text.startswith("id: "):
                event_id = text[4:]
            elif text.startswith("data: "):
                yield event_id, json.loads(text[6:])


def _check_stream(found: list[tuple[str, dict]]) -> None:
    texts, following = {0: "", 1: ""}, {0: 0, 1: 0}
    for _, delta in found[:-1]:
        choice = delta.get("choice", 0)
        assert delta.get("offset", 0) == following[choice]
        following[choice] += len(delta.get("token_ids", ()))
        texts[choice] += delta.get("text", "")
    assert texts == dict.fromkeys((0, 1), ("abc " * NUM_TOKENS)[:NUM_TOKENS])
    assert found[-1][1]["state"] == "succeeded"
