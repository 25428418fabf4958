"""`bench/chaos.py`, short, with a real engine: ten kinds of fault, each planned once.

A fault whose target is down at its time is skipped; those below that prove the most
must have been done.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench_modules import BENCH
from support.pools import clean_environment

pytestmark = pytest.mark.timeout(420)  # a busy machine starts processes slowly
SEED = 4
SECONDS = 20
JOBS = 100
FAULTS = (
    *("worker.kill", "worker.stop", "worker.term", "scheduler.kill", "subscriber.kill"),
    *("producer.kill", "redis.kill", "connections.kill", "proxy.drop", "proxy.freeze"),
)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last line of a run; its exit code says that nothing was breached."""
    command = [sys.executable, str(BENCH / "chaos.py"), "--seed", str(SEED)]
    command += ["--minutes", str(SECONDS / 60), "--jobs", str(JOBS)]
    command += ["--every", str(SECONDS / len(FAULTS)), "--faults", ",".join(FAULTS)]
    command += ["--patience", "240"]
    command += ["--keep", str(Path(tmp_path_factory.mktemp("chaos")))]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:] + done.stdout[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_nothing_is_lost_repeated_or_left_over(ledger) -> None:
    assert ledger["problems"] == []
    assert sum(ledger["jobs_by_state"].values()) == JOBS
    assert ledger["jobs_by_state"]["succeeded"] > JOBS / 2


def test_the_run_did_hurt(ledger) -> None:
    """Without these the comparison above would prove nothing."""
    done = ledger["faults_by_kind"]
    assert sum(done.values()) >= len(FAULTS) - 3, ledger["faults_skipped"]
    assert done.get("worker.kill", 0) + done.get("worker.stop", 0) > 0
    assert done.get("redis.kill", 0) > 0, ledger["faults_skipped"]
    assert done.get("scheduler.kill", 0) > 0, ledger["faults_skipped"]
    broken = ("connections.kill", "proxy.drop", "proxy.freeze")
    assert any(done.get(kind, 0) for kind in broken), ledger["faults_skipped"]
    assert ledger["lease_losses"] > 0
    assert ledger["resumed_tokens"] > 0
    assert ledger["subscriber_incarnations"] > 3
    assert ledger["jobs_by_state"].get("cancelled", 0) > 0
