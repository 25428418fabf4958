"""A worker whose step never ends: it must go, and its jobs must not go with it."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.pools import MODEL, clean_environment, up
from support.waiting import wait_until

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.keys import Keys

EXIT_STUCK = 75


class Workers:
    """Workers of one pool, each started by the test."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self.url = url
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, engine: str) -> subprocess.Popen[bytes]:
        log = self._directory / f"worker{len(self.processes)}.out"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenmill", "work", "--url", self.url),
                    *("--name", MODEL, "--engine", engine),
                ],
                env={
                    **clean_environment(),
                    "TOKENMILL_WORKER_STEP_TIMEOUT_S": "1",
                    "TOKENMILL_WORKER_LEASE_MS": "1500",
                },
                cwd=self._directory,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with up(tmp_path, "--no-worker") as pool:
        made = Workers(tmp_path, pool.url)
        try:
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.wait()


async def test_jobs_of_a_worker_that_hangs_run_elsewhere(workers: Workers) -> None:
    url = workers.url
    stuck = workers.start("echo:600000")  # its first step takes ten minutes
    async with Client(url) as mill:
        with redis.Redis.from_url(url) as client:
            await wait_until(lambda: client.hexists("tm:models", MODEL))
            # Its name is known a moment before its group is.
            job = await mill.submit(
                Prompt("hello", model=MODEL, sampling=Sampling(max_tokens=50)),
                when_unserved="wait",
            )
            code = await asyncio.to_thread(stuck.wait, 60)
            assert code == EXIT_STUCK
            workers.start("echo:5")
            result = await job.result(timeout=60)
            fields = client.hgetall(Keys(MODEL, 0).job(job.id))
    assert result.text == "hello"
    assert int(fields[b"lease_losses"]) == 1
    assert int(fields[b"epoch"]) >= 2
