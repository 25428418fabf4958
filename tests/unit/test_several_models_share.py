"""What a share of the host means to one worker: memory, cores, threads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
from support.pools import clean_environment

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.workers import share
from tokenmill.workers.engine.model import budget
from tokenmill.workers.engine.model.budget import MIB, bound_memory, free_memory

HALF = ModelConfig(name="m", share=0.5)


@pytest.fixture
def bounded_host(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """1000 MiB, of which 900 are free; this process has 100 of its own."""
    memory = SimpleNamespace(total=1000 * MIB, available=900 * MIB)
    taken = SimpleNamespace(rss=140 * MIB, shared=40 * MIB)
    process = SimpleNamespace(memory_info=lambda: taken)
    monkeypatch.setattr(budget.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(budget.psutil, "Process", lambda: process)
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    yield
    bound_memory(None)


@pytest.mark.usefixtures("bounded_host")
def test_two_workers_do_not_count_the_same_free_memory() -> None:
    assert free_memory().size == 900 * MIB
    bound_memory(0.5)
    assert free_memory().size == 400 * MIB  # half of the whole, less what it has
    assert "share 0.5" in free_memory().source
    bound_memory(0.05)
    assert free_memory().size == 0
    bound_memory(1.0)
    assert free_memory().size == 900 * MIB


@pytest.mark.usefixtures("bounded_host")
def test_in_a_container_the_whole_is_its_limit(tmp_path) -> None:
    (tmp_path / "memory.max").write_text(f"{600 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    bound_memory(0.5)
    assert free_memory().size == 200 * MIB


@pytest.mark.usefixtures("bounded_host")
def test_ranks_have_a_share_each_and_do_not_divide_it_again() -> None:
    def blocks(sharers: int) -> int:
        shape = SimpleNamespace(bytes_per_token=lambda _kind: MIB)
        return budget.pool_blocks(
            shape, kind="int8", block_size=1, kv_memory_mb=None, sharers=sharers
        )

    budget.MARGIN_BYTES, margin = 0, budget.MARGIN_BYTES
    try:
        assert blocks(2) * 2 == blocks(1)
        bound_memory(0.5)
        assert blocks(2) == blocks(1)
    finally:
        budget.MARGIN_BYTES = margin


def test_a_worker_started_by_hand_takes_threads_for_its_share(monkeypatch) -> None:
    monkeypatch.setattr(share, "available_cores", lambda: tuple(range(8)))
    within = share.within_share

    def threads(model: ModelConfig, worker: WorkerConfig | None = None) -> int | None:
        return within(worker or WorkerConfig(), model, {}).threads

    assert threads(HALF) == 4
    assert threads(ModelConfig(name="m", share=0.25, tp=2)) == 4
    assert threads(ModelConfig(name="m", share=0.01)) == 1
    assert threads(ModelConfig(name="m")) is None
    assert threads(ModelConfig(name="m", share=0.5, devices=(0,))) is None
    assert threads(HALF, WorkerConfig(threads=3)) == 3


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="cores cannot be bound here"
)
def test_told_cores_bind_the_process_and_its_children() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, subprocess, sys\n"
        "from tokenmill.workers.share import bind_cores\n"
        "assert bind_cores()\n"
        "ask = 'import os; print(sorted(os.sched_getaffinity(0)))'\n"
        "subprocess.run([sys.executable, '-S', '-c', ask], check=True)\n"
    )
    env = {**clean_environment(), "TOKENMILL_PROC_CORES": str(core)}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == f"[{core}]"
    assert set(psutil.Process().cpu_affinity()) == os.sched_getaffinity(0)


def test_cores_that_are_gone_leave_a_share_of_threads(monkeypatch) -> None:
    def refuse(_pid: int, _cores: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    monkeypatch.setattr(share, "available_cores", lambda: (0, 1, 2, 3))
    told = {"TOKENMILL_PROC_CORES": "90"}
    assert share.within_share(WorkerConfig(), HALF, told).threads == 2
