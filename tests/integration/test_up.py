"""`tokenmill up`: what it starts, says, shares, refuses and leaves behind."""

import json
import signal
import subprocess
import sys

import psutil
import pytest
import redis
from support.pools import MODEL, UpProcess, all_gone, clean_environment, up
from support.waiting import wait_until_sync

from tokenmill import Prompt, Sampling, SyncClient
from tokenmill.shared.keys import Keys


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with up(tmp_path_factory.mktemp("pool")) as running:
        yield running


def command(pool: UpProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", *arguments],
        env=pool.env,
        cwd=pool.directory,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_one_line_per_process_and_where_to_connect(pool) -> None:
    assert pool.pids("redis")
    assert pool.pids("scheduler")
    assert pool.pids("worker-0")
    assert "connect: redis://:***@127.0.0.1:" in pool.text
    assert "| ready: model echo" in pool.text


def test_a_client_finds_the_pool_and_is_answered(pool) -> None:
    with SyncClient(pool.url) as mill:
        job = mill.submit(Prompt("hello there", model=MODEL))
        assert job.result(timeout=60).text == "hello there"


def test_the_connection_file_is_private_and_the_password_is_nowhere_else(pool) -> None:
    assert (pool.directory / "pool.json").stat().st_mode & 0o777 == 0o600
    password = pool.url.split(":")[2].split("@")[0]
    assert len(password) >= 24
    for process in pool.family():
        assert password not in " ".join(process.cmdline())
    assert password not in pool.text
    for log in (pool.directory / "logs").glob("*.log"):
        assert password not in log.read_text()


def test_the_server_keeps_jobs_and_evicts_nothing(pool) -> None:
    with redis.Redis.from_url(pool.url) as client:
        assert client.config_get("appendonly")["appendonly"] == "yes"
        assert client.config_get("maxmemory-policy") == {
            "maxmemory-policy": "noeviction"
        }
        assert client.config_get("bind")["bind"] == "127.0.0.1"
    host, port = pool.url.split("@")[1].split("/")[0].split(":")
    with redis.Redis(host, int(port)) as stranger, pytest.raises(redis.RedisError):
        stranger.ping()


def test_a_second_pool_with_the_same_directory_is_refused(pool) -> None:
    second = command(pool, "up", "--engine", "echo", "--model", MODEL)
    assert second.returncode == 2
    assert "a pool already runs" in second.stderr
    assert str(pool.process.pid) in second.stderr


def test_doctor_finds_nothing_wrong_and_says_so_in_json(pool) -> None:
    report = command(pool, "doctor", "--json")
    findings = {one["name"]: one for one in json.loads(report.stdout)}
    assert report.returncode == 0, report.stdout
    assert findings[f"model {MODEL}"]["severity"] == "info"
    assert findings[f"scheduler {MODEL}:0"]["severity"] == "info"
    assert findings["persistence"]["severity"] == "info"


def test_doctor_prints_findings_and_nothing_else(pool) -> None:
    report = command(pool, "doctor")
    assert report.stderr == ""
    starts = {line.split()[0] for line in report.stdout.splitlines()}
    assert starts <= {"ok", "warn", "ERROR", "cure:"}
    assert "0 overruns" in report.stdout


def test_a_killed_worker_is_replaced_under_a_new_name(pool) -> None:
    (first,) = pool.pids("worker-0")[:1]
    psutil.Process(first).kill()

    def replaced() -> bool:
        pids = pool.pids("worker-0")
        return pids[-1] != first and pool.text.count("| ready: model echo") >= 2

    wait_until_sync(replaced)
    assert "died (exit -9)" in pool.text
    keys = Keys(MODEL, 0)
    with redis.Redis.from_url(pool.url) as client:
        # The dead incarnation has left: no jobs are given to it any more.
        assert len(client.zrange(keys.groups, 0, -1)) == 1


def test_a_killed_redis_is_started_again_with_its_data_and_address(pool) -> None:
    url, (first,) = pool.url, pool.pids("redis")[:1]
    with redis.Redis.from_url(url) as client:
        client.config_set("appendfsync", "always")  # else the last second may be lost
    with SyncClient(url) as mill:
        done = mill.submit(Prompt("before", model=MODEL))
        assert done.result(timeout=60).text == "before"
        job_id = done.id
        psutil.Process(first).kill()
        wait_until_sync(lambda: pool.pids("redis")[-1] != first)
    with redis.Redis.from_url(url) as client:
        wait_until_sync(lambda: answers(client), what="the new server")
    with SyncClient(url) as mill:
        assert mill.job(job_id).result(timeout=60).text == "before"
        after = mill.submit(Prompt("after", model=MODEL))
        assert after.result(timeout=60).text == "after"


def answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def test_a_bad_setting_ends_up_at_once_and_names_the_key(tmp_path) -> None:
    settings = tmp_path / "tokenmill.toml"
    settings.write_text("[worker]\nmax_runing = 3\n")
    ended = subprocess.run(
        [sys.executable, "-m", "tokenmill", "up"],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 2
    assert "worker.max_runing" in ended.stderr
    assert not (tmp_path / "redis").exists()


def test_a_worker_that_can_never_start_ends_the_pool_with_its_code(tmp_path) -> None:
    pool = UpProcess(tmp_path, engine="nonsense")
    assert pool.process.wait(150) == 2, pool.text
    assert "failed (exit 2)" in pool.text
    assert "nonsense" in pool.text  # the end of the worker's log is shown


def test_a_given_server_is_used_and_left_alone(tmp_path, newest_redis) -> None:
    with redis.Redis.from_url(newest_redis.url) as client:
        client.flushall()
    with up(tmp_path, "--url", newest_redis.url) as pool:
        assert not pool.pids("redis")
        assert "(given)" in pool.text
        with SyncClient(newest_redis.url) as mill:
            job = mill.submit(Prompt("abc", model=MODEL))
            assert job.result(timeout=60).text == "abc"
        assert pool.stop() == 0
    assert newest_redis.answers()
    with redis.Redis.from_url(newest_redis.url) as client:
        client.flushall()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_in_order_and_leaves_nothing(tmp_path, number) -> None:
    with up(tmp_path, "--standby", "1") as pool:
        family = pool.family()
        assert len(family) >= 4
        assert pool.stop(number) == 0
        assert all_gone(family)
        text = pool.text
        worker, scheduler = (
            next(m for m in text.splitlines() if m.startswith(n) and "stopped" in m)
            for n in ("worker-0", "scheduler")
        )
        assert text.index(worker) < text.index(scheduler)
        assert not (tmp_path / "pool.json").exists()


def test_a_second_signal_ends_at_once_and_ends_leases_first(tmp_path) -> None:
    with up(tmp_path, engine="echo:50") as pool, SyncClient(pool.url) as mill:
        family = pool.family()
        sampling = Sampling(max_tokens=100_000, ignore_eos=True)
        job = mill.submit(Prompt("abc", model=MODEL, sampling=sampling))
        next(iter(job.stream()))
        pool.process.send_signal(signal.SIGINT)
        wait_until_sync(lambda: "draining" in pool.text)
        pool.process.send_signal(signal.SIGINT)
        assert pool.process.wait(60) == 0
        assert all_gone(family)
        assert "1 jobs of" in pool.text
        assert "not ended" not in pool.text


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_a_killed_supervisor_leaves_no_process_and_its_state_can_be_taken_over(
    tmp_path,
) -> None:
    with up(tmp_path) as pool:
        family = pool.family()
        pool.process.kill()
        pool.process.wait()
        assert all_gone(family)
    with up(tmp_path) as successor, SyncClient(successor.url) as mill:
        job = mill.submit(Prompt("again", model=MODEL))
        assert job.result(timeout=60).text == "again"
