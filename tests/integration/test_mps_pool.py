"""A pool whose workers share a CUDA device through a stand-in of MPS (no GPU)."""

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.mps_stand_in import UUIDS, ask, install
from support.pools import MODEL, UpProcess, up
from support.waiting import wait_until_sync

from tokenmill import Prompt, Sampling, SyncClient
from tokenmill.workers.mps_control import Control

MODELS = json.dumps(
    [{"name": MODEL, "devices": [0], "replicas": 2, "share": 0.5}],
)
LONG = Prompt("words " * 40, model=MODEL, sampling=Sampling(max_tokens=200))


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[UpProcess]:
    """Two workers on one device, 10 ms a step."""
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        program = install(Path(directory) / "bin")
        path = f"{program.parent}:{os.environ['PATH']}"
        settings = {"TOKENMILL_MPS_CHECK_S": "0.2", "TOKENMILL_MODELS": MODELS}
        with up(Path(directory), engine="echo:10", PATH=path, **settings) as running:
            wait_until_sync(lambda: len(workers(running)) == 2)
            yield running


def workers(pool: UpProcess) -> list[int]:
    """The workers that take jobs, by process."""
    found = []
    for name in ("worker-0", "worker-1"):
        pid = pool.pids(name)[-1:]
        if pid and f"{name:<12} pid {pid[0]:<8} running" in pool.text:
            found += pid
    return found


def control(pool: UpProcess) -> Control:
    pipes = pool.directory / "mps" / "0" / "pipe"
    return Control(pool.directory / "bin" / "nvidia-cuda-mps-control", pipes)


def restarted(pool: UpProcess, before: list[int]) -> None:
    wait_until_sync(
        lambda: len(now := workers(pool)) == 2 and not set(now) & set(before),
        what=f"two new workers\n{pool.text}",
    )


def test_workers_are_clients_of_the_pool_s_own_daemon(shared_pool) -> None:
    (server,) = control(shared_pool).servers() or ()
    assert server.status == "ACTIVE"
    for pid in workers(shared_pool):
        env = psutil.Process(pid).environ()
        assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{UUIDS[0]}=40000M"
        assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(control(shared_pool).pipes)


def test_a_fault_of_one_client_restarts_all_and_no_job_is_lost(shared_pool) -> None:
    before, asked = workers(shared_pool), control(shared_pool)
    (server,) = asked.servers() or ()
    with SyncClient(shared_pool.url) as mill:
        jobs = [mill.submit(LONG) for _ in range(4)]
        wait_until_sync(lambda: jobs[-1].info().state == "running")
        ask(asked.program, asked.pipes, f"stand_in_fault {server.pid}")
        wait_until_sync(
            lambda: not any(map(psutil.pid_exists, before)),
            what=f"the end of both workers\n{shared_pool.text}",
        )
        ask(asked.program, asked.pipes, f"stand_in_recover {server.pid}")
        restarted(shared_pool, before)
        for job in jobs:
            result = job.result(timeout=60)
            assert result.text.startswith("words words")
            assert result.usage.completion_tokens == 200
            # Whose error it was is not known: it does not count.
            assert job.info().lease_losses == 0
    assert "mps_server_lost" in shared_pool.logs()


def test_a_dead_daemon_is_started_again_and_served_again(shared_pool) -> None:
    before, asked = workers(shared_pool), control(shared_pool)
    (run,) = (
        process
        for process in shared_pool.family()
        if process.cmdline()[-1:] == ["-f"] and "mps_stand_in" in process.cmdline()[-2]
    )
    run.send_signal(signal.SIGKILL)
    restarted(shared_pool, before)
    assert asked.servers()
    with SyncClient(shared_pool.url) as mill:
        short = Prompt("hello there", model=MODEL)
        assert mill.submit(short).result(timeout=60).text == "hello there"
    assert "ended with exit code -9" in shared_pool.logs()


def test_the_daemon_ends_after_the_workers(shared_pool) -> None:
    """The last: it stops the pool."""
    asked = control(shared_pool)
    assert asked.servers() is not None
    assert shared_pool.stop() == 0
    stopped = re.findall(r"^(\S+) +stopped$", shared_pool.text, re.M)
    assert stopped.index("worker-1") < stopped.index("mps-0")
    assert asked.servers() is None
