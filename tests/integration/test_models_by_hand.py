"""Versions whose workers nobody supervises: `tokenmill work --version` loads them."""

import signal
from collections.abc import Iterator

import pytest
from support.pools import MODEL
from support.servers import SERVERS, running
from support.solo import Solo, solo
from support.waiting import wait_until_sync

from tokenmill import Prompt, SyncClient
from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.health_set import parse_health_set


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Solo]:
    directory = tmp_path_factory.mktemp("hand")
    with (
        running(SERVERS[-1]) as server,
        solo(directory, server.url, TOKENMILL_WORKER_LEASE_MS="2000") as pool,
    ):
        pool.schedule("scheduler")
        pool.work("first", "echo")
        pool.wait_ready("first")
        yield pool


def work(pool: Solo, name: str, version: str) -> None:
    pool.start(name, "work", "--name", MODEL, "--engine", "echo", "--version", version)


def test_a_worker_by_hand_loads_its_version_and_takes_no_share(by_hand) -> None:
    with SyncClient(by_hand.url) as mill:
        mill.add_version(ModelConfig(name=MODEL, version="v2"))
        work(by_hand, "second", "v2")
        by_hand.wait_ready("second")
        assert mill.load_version(MODEL, "v2", wait_s=60).share == 0

        def described() -> bool:
            states = {v.version: v.state for v in mill.model_versions(MODEL)}
            return states == {"v1": "ready", "v2": "ready"}

        wait_until_sync(described, what="v1, which its worker describes")
        mill.switch_version(MODEL, "v2")
        job = mill.submit(Prompt("hello", model=MODEL))
        assert job.result(timeout=60).version == "v2"
        # Its worker ends by itself, and in peace.
        assert mill.drain_version(MODEL, "v1", wait_s=60).state == "stopped"
        assert by_hand.processes["first"].wait(60) == 0


def test_a_worker_of_an_unknown_version_says_which_there_are(by_hand) -> None:
    work(by_hand, "unknown", "v7")
    assert by_hand.processes["unknown"].wait(60) == 8
    said = by_hand.log("unknown").read_text()
    assert "there is no version v7" in said
    assert "known: v1, v2" in said


def test_a_failed_health_set_ends_a_worker_by_hand_and_is_told(by_hand) -> None:
    checks = parse_health_set(b'{"prompt": "a", "exact": "b"}', "set")
    with SyncClient(by_hand.url) as mill:
        mill.add_version(ModelConfig(name=MODEL, version="v3"), checks)
        work(by_hand, "third", "v3")
        assert by_hand.processes["third"].wait(60) == 20
        (failed,) = [v for v in mill.model_versions(MODEL) if v.version == "v3"]
        assert failed.state == "failed"
        assert "line 1: expected exactly 'b', got 'a'" in failed.reason
        assert failed.groups == 0


def test_a_signal_still_ends_a_worker(by_hand) -> None:
    by_hand.processes["second"].send_signal(signal.SIGTERM)
    assert by_hand.processes["second"].wait(60) == 0
    with SyncClient(by_hand.url) as mill:
        (left,) = [v for v in mill.model_versions(MODEL) if v.version == "v2"]
        assert (left.state, left.groups) == ("ready", 0)
