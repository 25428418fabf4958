"""What the peers of bench/queue.py share: one submits, one reads every result back.

Imported by `queue_arq.py`, `queue_streaq.py` and `queue_taskiq.py`, each of which runs
in the environment of its own library; so nothing but the standard library is used.

    SCRIPT work URL                worker processes, until they are ended
    SCRIPT produce URL JOBS        (job id, text) pairs to standard output
    SCRIPT read URL JOBS           the same from standard input

`produce` prints its report to standard error, `read` to standard output, as
`queue_client.py` does for tokenmill.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

BATCH = 500
"""Jobs that are given to the library at once."""
READERS = 50
"""Results that are waited for at once; most are there at the first look. streaQ takes a
connection for each and stands still when its 64 are used up."""
WORKERS = 2
"""Worker processes of a peer: tokenmill has a scheduler and a worker."""


class Side(Protocol):
    """A library, as its own documentation would have it used by a client."""

    async def enqueue(self, texts: Sequence[str]) -> list[str]:
        """Enqueues a job for each text; returns their ids."""
        ...

    async def result(self, job_id: str) -> str:
        """Waits for a job's end and returns what it gave back."""
        ...


Opener = Callable[[str], AbstractAsyncContextManager[Side]]


def text_of(number: int) -> str:
    """The text that a job echoes; the same as in `queue_client.py`."""
    return f"job {number}: " + "mill " * (number % 13)


async def produce(opened: Opener, url: str, count: int) -> None:
    """Enqueues in batches; prints (job id, text) pairs for the reader."""
    async with opened(url) as side:
        began, cpu_began = time.time(), time.process_time()
        for first in range(0, count, BATCH):
            texts = [text_of(n) for n in range(first, min(first + BATCH, count))]
            ids = await side.enqueue(texts)
            print(json.dumps(list(zip(ids, texts, strict=True))), flush=True)
        report = {
            "began": began,
            "submit_s": time.time() - began,
            "cpu_s": time.process_time() - cpu_began,
        }
    print(json.dumps(report), file=sys.stderr)


async def read(opened: Opener, url: str, count: int) -> None:
    """Reads every result, some at a time, and compares it with what was sent."""
    loop, cpu_began = asyncio.get_running_loop(), time.process_time()
    expected: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    async with opened(url) as side:
        readers = [asyncio.create_task(compare(side, expected)) for _ in range(READERS)]
        seen = 0
        while seen < count:
            line = await loop.run_in_executor(None, sys.stdin.readline)
            if not line:
                raise SystemExit("the producer stopped early")
            for job_id, text in json.loads(line):
                expected.put_nowait((job_id, text))
                seen += 1
        for _ in readers:
            expected.put_nowait(("", ""))
        wrong = sum([await reader for reader in readers])
        ended = time.time()
    report = {
        "cpu_s": time.process_time() - cpu_began,
        "ended": ended,
        "read": seen,
        "wrong": wrong,
    }
    print(json.dumps(report), flush=True)


async def compare(side: Side, expected: "asyncio.Queue[tuple[str, str]]") -> int:
    """Reads results until an empty id comes; returns how many were wrong."""
    wrong = 0
    while True:
        job_id, text = await expected.get()
        if not job_id:
            return wrong
        wrong += await side.result(job_id) != text


def main(opened: Opener, work: Callable[[str], None]) -> None:
    """Runs the part that the first argument names.

    Args:
        opened: Opens the library for a client.
        work: Runs worker processes until they are ended.
    """
    kind, url = sys.argv[1], sys.argv[2]
    gc.freeze()
    if kind == "work":
        work(url)
        return
    part = produce if kind == "produce" else read
    runner = asyncio.Runner(loop_factory=fast_loop())
    with runner:
        runner.run(part(opened, url, int(sys.argv[3])))


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
