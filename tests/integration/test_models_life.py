"""The life of versions in a pool of real processes, with an engine that echoes."""

import json
import re
import signal
import time

import psutil
import pytest
from click.testing import Result
from support.pools import MODEL, UpProcess, up
from support.waiting import wait_until_sync
from typer.testing import CliRunner

from tokenmill import Prompt, SyncClient
from tokenmill.__main__ import build_app
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import (
    InvalidRequest,
    UnknownVersion,
    VersionConflict,
    VersionFailed,
)
from tokenmill.shared.health_set import parse_health_set
from tokenmill.shared.pool.versions import LOOK_EVERY_S

GOOD = b'{"prompt": "abc", "exact": "abc"}\n{"prompt": "xyz", "regex": "^x.z$"}'
BAD = b'{"prompt": "abc", "exact": "abc"}\n\n{"prompt": "xyz", "prefix": "no"}'


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    quick = {"TOKENMILL_WORKER_LEASE_MS": "2000"}
    with up(tmp_path_factory.mktemp("life"), janitor=True, **quick) as pool:
        yield pool


@pytest.fixture(scope="module")
def operator(living):
    with SyncClient(living.url) as mill:
        yield mill


def models(pool: UpProcess, *arguments: str) -> Result:
    words = ["models", *arguments, "--url", pool.url]
    return CliRunner().invoke(build_app(), words)


def config(version: str, **changes: object) -> ModelConfig:
    return ModelConfig(name=MODEL, version=version, **changes)


def state(mill: SyncClient, version: str) -> str:
    return {v.version: v.state for v in mill.model_versions(MODEL)}[version]


def served_by(mill: SyncClient, count: int = 12) -> set[str | None]:
    jobs = mill.submit_many([Prompt(f"n {n}", model=MODEL) for n in range(count)])
    return {job.result(timeout=60).version for job in jobs}


def test_a_version_is_loaded_tried_switched_to_and_back(living, operator) -> None:
    health = living.directory / "health.jsonl"
    health.write_bytes(GOOD)
    added = models(living, "add", MODEL, "v2", "--health", str(health), "--json")
    assert json.loads(added.stdout)["health_checks"] == 2, added.stderr
    loaded = models(living, "load", MODEL, "v2", "--json")
    info = json.loads(loaded.stdout)
    assert info["state"] == "ready", loaded.stderr
    assert info["health"]["passed"]
    assert info["share"] == 0
    assert served_by(operator) == {"v1"}

    assert operator.shadow_version(MODEL, "v2", 100).copied == 0
    wait_until_sync(lambda: _copies(operator), what="copies")
    report = operator.shadow_report(MODEL, "v2")
    assert report.exact == report.prefix == 1.0
    assert report.failed == 0
    assert report.shadow.total_p95_ms is not None
    tenants = {row.tenant: row.jobs for row in operator.usage()}
    assert tenants["tokenmill.shadow"] >= report.compared
    ended = models(living, "shadow", MODEL, "v2", "--percent", "0")
    assert "nothing is copied" in ended.stdout

    switched = models(living, "switch", MODEL, "v2", "--percent", "50")
    assert "v1 50 %, v2 50 %" in switched.stdout, switched.stderr
    assert served_by(operator, 40) == {"v1", "v2"}
    assert operator.switch_version(MODEL, "v2") == {"v2": 100}
    assert served_by(operator) == {"v2"}
    assert operator.rollback_version(MODEL) == {"v1": 50, "v2": 50}
    assert operator.switch_version(MODEL, "v1") == {"v1": 100}
    assert served_by(operator) == {"v1"}


def _copies(mill: SyncClient) -> bool:
    served_by(mill, 4)
    return mill.shadow_report(MODEL, "v2").compared >= 4


def test_a_version_without_share_drains_and_can_come_back(living, operator) -> None:
    drained = models(living, "drain", MODEL, "v2")
    assert drained.stdout.strip() == f"v2 of {MODEL} is stopped", drained.stderr
    groups = {v.version: v.groups for v in operator.model_versions(MODEL)}
    assert groups["v2"] == 0
    with pytest.raises(VersionConflict, match="models load"):
        operator.switch_version(MODEL, "v2")
    assert operator.load_version(MODEL, "v2").state == "ready"
    operator.switch_version(MODEL, "v2")
    assert operator.drain_version(MODEL, "v1").state == "stopped"
    # v1 has no workers: going back loads it first.
    assert operator.rollback_version(MODEL) == {"v1": 100}
    assert served_by(operator) == {"v1"}


def test_what_cannot_be_done_says_what_would_work(living, operator) -> None:
    with pytest.raises(VersionConflict, match="in use"):
        operator.add_version(config("v2"))
    with pytest.raises(VersionConflict, match=f"models switch {MODEL} v2"):
        operator.drain_version(MODEL, "v1")
    with pytest.raises(UnknownVersion, match="models add"):
        operator.load_version(MODEL, "v9")
    with pytest.raises(UnknownVersion, match="no version v9"):
        operator.switch_version(MODEL, "v9", 0)
    with pytest.raises(InvalidRequest, match=f"known: {MODEL}"):
        operator.model_versions("nosuch")
    bad = living.directory / "bad.jsonl"
    bad.write_text('{"prompt": "a", "exact": "b"}\n{"prompt": "a", "regex": "("}\n')
    refused = models(living, "add", MODEL, "v8", "--health", str(bad), "--json")
    error = json.loads(refused.stderr)["error"]
    assert refused.exit_code == 4
    assert error["field"] == "bad.jsonl line 2: regex"
    wrong = models(living, "add", MODEL, "v8", "--weights", "int7", "--device", "0")
    assert "'int7' is unusable: expected one of int8, float32" in wrong.stderr
    listed = models(living, "list", MODEL)
    assert listed.stdout.splitlines()[0].split()[:4] == [
        *("MODEL", "VERSION", "STATE", "SHARE"),
    ]
    assert models(living).stdout.splitlines()[0].split()[0] == "MODEL"


def test_a_version_that_fails_its_health_set_never_gets_traffic(
    living, operator
) -> None:
    operator.add_version(config("v3"), parse_health_set(BAD, "set"))
    with pytest.raises(VersionFailed, match=r"line 3.*begins with 'no'"):
        operator.load_version(MODEL, "v3")
    with pytest.raises(VersionConflict, match="has failed"):
        operator.switch_version(MODEL, "v3")
    assert served_by(operator) == {"v1"}
    name = f"worker-{MODEL}-v3-0"
    started = len(living.pids(name))
    end = time.monotonic() + 1.5
    wait_until_sync(lambda: time.monotonic() > end)  # it would be started again by now
    assert len(living.pids(name)) == started == 1
    operator.remove_version(MODEL, "v3")
    assert "v3" not in {v.version for v in operator.model_versions(MODEL)}


def test_a_model_added_at_run_time_can_be_retired(living, operator) -> None:
    assert models(living, "add", "guest", "v1").exit_code == 0
    assert operator.load_version("guest", "v1").groups == 1
    job = operator.submit(Prompt("hello", model="guest"))
    assert job.result(timeout=60).version == "v1"
    assert operator.model_versions("guest")[0].share == 100
    with pytest.raises(VersionConflict, match="models retire guest"):
        operator.drain_version("guest", "v1")
    retired = models(living, "retire", "guest", "--json")
    assert json.loads(retired.stdout) == {"model": "guest", "retired": True}
    assert "guest" not in models(living).stdout
    with pytest.raises(InvalidRequest, match="no versions here"):
        operator.model_versions("guest")
    with pytest.raises(VersionConflict, match="in the settings of this pool"):
        operator.retire_model(MODEL)
    wrong = models(living, "add", MODEL, "v 9")
    assert "configuration key 'version': value 'v 9'" in wrong.stderr


def stop_slowly(pool: UpProcess) -> None:
    """Stops a pool whose scheduler ends long after the workers have ended."""
    scheduler = psutil.Process(pool.pids("scheduler")[-1])
    scheduler.suspend()
    pool.process.send_signal(signal.SIGTERM)
    ended = re.compile(r"^worker-echo-v2\S* +stopped", re.M)
    wait_until_sync(lambda: ended.search(pool.text), what="the end of v2")
    late = time.monotonic() + 3 * LOOK_EVERY_S
    wait_until_sync(lambda: time.monotonic() > late, what="some more looks")
    scheduler.resume()
    assert pool.process.wait(60) == 0


def test_versions_outlive_the_pool(living, operator) -> None:
    operator.switch_version(MODEL, "v2")
    operator.drain_version(MODEL, "v1")
    stop_slowly(living)
    assert "starting" not in living.text.partition("draining;")[2]
    with up(living.directory) as second, SyncClient(second.url) as mill:
        assert served_by(mill) == {"v2"}
        assert state(mill, "v1") == "stopped"
        assert not second.pids("worker-0")
        assert "was drained and stays so" in second.text
