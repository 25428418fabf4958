"""What HTTP adds to the client: requests a second, processor time, delay of a token.

    python bench/gateway.py [--seconds 5] [--save]

One pool with the echo engine, one gateway, and in turns two ways in: `tokenmill.Client`
straight to Redis, and POST /v1/completions over kept connections. The delay of a token
is measured on single jobs that are followed both ways at once: how much later the same
token is there over HTTP. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import psutil
from harness import finish, machine, percentile, show
from load_pool import Target, own_pool

from tokenmill import Client, Prompt, Sampling

MODEL = "echo"
WORKERS = 32
"""Callers, each with one request at a time."""
PROMPT = "a prompt of some thirty-two bytes"
TOKENS, STREAMS = 100, 16
STEP_MS = 20
"""Of the engine, while tokens are timed."""
TARGETS = {"added_ms_p50": 5.0}


class Caller:
    """One kept connection: less work than any library, so that the gateway is
    measured and not its client.
    """

    def __init__(self, base: str) -> None:
        self._host, _, self._port = base.removeprefix("http://").partition(":")

    async def open(self) -> None:
        """Connects."""
        self._reader, self._writer = await asyncio.open_connection(
            self._host, int(self._port)
        )

    async def post(self, **fields: object) -> dict[str, str]:
        """Sends a request and reads the head of its answer."""
        body = json.dumps({"model": MODEL, **fields}).encode()
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        assert " 200 " in status, head
        return {k.lower(): v for k, _, v in (one.partition(": ") for one in lines)}

    async def whole(self) -> None:
        """One request that waits for its answer."""
        headers = await self.post(prompt=PROMPT, max_tokens=64)
        await self._reader.readexactly(int(headers["content-length"]))

    async def line(self) -> bytes:
        """The next line of an answer."""
        return await self._reader.readline()

    def close(self) -> None:
        """Ends the connection."""
        self._writer.close()


async def rate(calls: list[Callable[[], Awaitable[object]]], seconds: float) -> float:
    """Calls a second, each caller with one at a time."""
    end, count = time.perf_counter() + seconds, 0

    async def work(call: Callable[[], Awaitable[object]]) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call()
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*map(work, calls))
    return count / (time.perf_counter() - began)


def cpu_s(process: psutil.Process) -> float:
    """Processor time that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


async def requests(target: Target, seconds: float) -> dict[str, float]:
    """Requests a second both ways, in turns, and what the gateway spends on each."""
    assert target.url is not None
    assert target.gateway is not None
    gateway = psutil.Process(target.roots[-1])
    callers = [Caller(target.gateway) for _ in range(WORKERS)]
    rates: dict[str, list[float]] = {"client": [], "gateway": []}
    spent_us: list[float] = []
    async with Client(target.url) as mill:

        async def plain() -> None:
            sampling = Sampling(max_tokens=64)
            job = await mill.submit(Prompt(PROMPT, model=MODEL, sampling=sampling))
            await job.result()

        for caller in callers:
            await caller.open()
        for turn in range(4):
            rates["client"].append(await rate([plain] * WORKERS, seconds / 4))
            before, began = cpu_s(gateway), time.perf_counter()
            found = await rate([one.whole for one in callers], seconds / 4)
            count = found * (time.perf_counter() - began)
            if turn:  # the first warms up
                spent_us.append((cpu_s(gateway) - before) / count * 1e6)
            rates["gateway"].append(found)
        for caller in callers:
            caller.close()
    client, http = max(rates["client"]), max(rates["gateway"])
    return {
        "client_per_s": round(client),
        "gateway_per_s": round(http),
        "gateway_to_client": round(http / client, 2),
        "gateway_cpu_us_per_request": round(min(spent_us)),
    }


async def tokens(target: Target) -> dict[str, float]:
    """How much later the same token is there over HTTP than straight from Redis."""
    assert target.url is not None
    assert target.gateway is not None
    gateway = psutil.Process(target.roots[-1])
    added: list[float] = []
    async with Client(target.url) as mill:
        before = cpu_s(gateway)
        await asyncio.gather(
            *(_follow_both(mill, target.gateway, added) for _ in range(STREAMS))
        )
        spent_s = cpu_s(gateway) - before
    return {
        "streams": STREAMS,
        "tokens": STREAMS * TOKENS,
        "added_ms_p50": round(median(added), 2),
        "added_ms_p95": round(percentile(added, 0.95), 2),
        "gateway_cpu_us_per_token": round(spent_s / (STREAMS * TOKENS) * 1e6),
    }


async def _follow_both(mill: Client, base: str, added: list[float]) -> None:
    caller = Caller(base)
    await caller.open()
    headers = await caller.post(prompt="x" * TOKENS, max_tokens=TOKENS, stream=True)
    direct: dict[int, float] = {}
    over_http: dict[int, float] = {}

    async def follow() -> None:
        size = 0
        async for delta in mill.job(headers["x-tokenmill-job"]).stream():
            size += len(delta.text)
            direct[size] = time.perf_counter()

    async def read() -> None:
        size = 0
        while (line := await caller.line()) != b"data: [DONE]\n":
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                size += sum(len(choice["text"]) for choice in choices)
                over_http[size] = time.perf_counter()

    await asyncio.gather(follow(), read())
    caller.close()
    # The first ones were on their way before both were following.
    shared = sorted(direct.keys() & over_http.keys())[2:]
    added += [(over_http[size] - direct[size]) * 1000 for size in shared]


def run(seconds: float) -> dict[str, object]:
    """Both measurements, each with a pool of its own."""
    report: dict[str, object] = {"benchmark": "gateway", **machine()}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for name, engine in (("at_once", "echo"), ("timed", f"echo:{STEP_MS}")):
            home = Path(directory) / name
            home.mkdir()
            with own_pool(home, engine=engine, model=MODEL, batch_size=64) as target:
                work = (
                    requests(target, seconds) if name == "at_once" else tokens(target)
                )
                figures = asyncio.run(work)
            show(f"gateway, {engine}", figures)
            report |= figures
    added = report["added_ms_p50"]
    assert isinstance(added, float)
    most = TARGETS["added_ms_p50"]
    slow = f"a token is {added} ms later over HTTP; expected at most {most}"
    report["problems"] = [slow] if added > most else []
    return report


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    return finish(run(options.seconds), save=options.save)


if __name__ == "__main__":
    raise SystemExit(main())
