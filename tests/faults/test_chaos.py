"""`bench/chaos.py`, short, with a real engine: ten kinds of fault, each planned once.

A fault whose target is down at its time is skipped; of each sort below one must have
been done. That leases are lost and output is resumed is for the long run, and for the
other tests in this folder, to prove.
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
    """Without these the comparison above would prove nothing.

    Which faults find their target up depends on how fast processes start here, so
    each is asked for as one of its sort.
    """
    done, skipped = ledger["faults_by_kind"], ledger["faults_skipped"]
    assert sum(done.values()) >= len(FAULTS) // 2, skipped
    sorts = (
        ("worker.kill", "worker.stop", "worker.term"),
        ("redis.kill", "scheduler.kill"),
        ("connections.kill", "proxy.drop", "proxy.freeze"),
    )
    for kinds in sorts:
        assert any(done.get(kind, 0) for kind in kinds), skipped
    assert ledger["streamed_deltas"] > JOBS
    assert ledger["jobs_by_state"].get("cancelled", 0) > 0
