"""Watching followers: scripted processes that load, fail, die, hang, talk nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from structlog.testing import capture_logs
from support.pools import all_gone, clean_environment
from support.waiting import wait_until_sync

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.parallel.adapter_orders import (
    DropOrder,
    LoadAnswer,
    LoadOrder,
)
from tokenmill.workers.rank_order import RankOrder, orders
from tokenmill.workers.rank_reports import Stage
from tokenmill.workers.ranks import Ranks

PLAYER = """
import json, os, signal, sys, threading, time
order = json.loads(sys.stdin.readline())
rank = order["rank"]
def say(**report):
    os.write(1, json.dumps(report).encode() + b"\\n")
def reach(*stages):
    for stage in stages:
        say(type="reached", stage=stage)
def live():
    while True:
        say(type="alive")
        time.sleep(0.05)
def follow():
    sys.stdin.read()
"""
LOADS = "threading.Thread(target=live, daemon=True).start(); reach(1, 2); follow()"


@pytest.fixture
def play() -> Iterator[object]:
    """Starts ranks that play a script; whatever it does, none is left afterwards."""
    made: list[Ranks] = []

    def start(script: str, size: int = 3, **options: object) -> Ranks:
        worker = WorkerConfig()
        first = RankOrder(
            group="w-test",
            rank=1,
            size=size,
            leader=os.getpid(),
            path="/nowhere",
            model=ModelConfig(name="m", tp=size),
            worker=worker,
            backend="gloo",
            rendezvous="",
            alive_s=0.05,
        )
        command = (sys.executable, "-c", PLAYER + script)
        chosen = {"silence_s": 5.0, **options}
        ranks = Ranks(orders(first, worker, (1,) * size), command=command, **chosen)
        made.append(ranks)
        ranks.start()
        return ranks

    yield start
    for ranks in made:
        ranks.close()
        assert gone(ranks)


def gone(ranks: Ranks) -> bool:
    """Whether none of them is there any more, not even as a zombie."""
    return not any(map(psutil.pid_exists, ranks.pids))


def lost(ranks: Ranks) -> str:
    return str(wait_until_sync(lambda: ranks.lost, what="the loss"))


def test_followers_load_follow_and_are_let_go(play) -> None:
    seen: list[tuple[int, str, float]] = []
    script = f'say(type="progress", stage="weights", fraction=rank / 2); {LOADS}'
    ranks = play(script, on_progress=lambda *report: seen.append(report))
    ranks.wait(Stage.READY)
    assert sorted(seen) == [(1, "weights", 0.5), (2, "weights", 1.0)]
    assert ranks.run(lambda: 7) == 7
    with capture_logs() as logs:
        ranks.close()
    assert logs == [], "they were let go, not killed"
    assert gone(ranks)
    assert ranks.lost is None


def test_orders_for_adapters_reach_all_and_answers_come_back(play) -> None:
    script = """
threading.Thread(target=live, daemon=True).start()
reach(1, 2)
for line in sys.stdin:
    heard = json.loads(line)
    say(type="adapter", ticket=heard["ticket"], digest=heard["type"], bytes=rank)
"""
    ranks = play(script)
    ranks.wait(Stage.READY)
    heard: list[tuple[int, LoadAnswer]] = []
    ranks.on_answer(lambda rank, answer: heard.append((rank, answer)))
    ranks.tell(LoadOrder("7", "/adapters/one"))
    ranks.tell(DropOrder("7"))
    wait_until_sync(lambda: len(heard) == 2 * ranks.size, what="all answers")
    for rank in (1, 2):
        assert [answer for one, answer in heard if one == rank] == [
            LoadAnswer(ticket="7", digest="load", bytes=rank),
            LoadAnswer(ticket="7", digest="drop", bytes=rank),
        ]
    ranks.close()
    ranks.tell(DropOrder("7"))  # nobody is left to hear it


def test_a_follower_that_fails_to_load_tells_why(play) -> None:
    failure = """
if rank == 2:
    say(type="failed", code="model_load_error", message="no memory")
    sys.exit(14)
"""
    ranks = play(failure + LOADS)
    with pytest.raises(ModelLoadError, match=r"rank 2 of 3 \(pid \d+\): no memory"):
        ranks.wait(Stage.READY)
    wait_until_sync(lambda: gone(ranks), what="the end of the others")


def test_the_only_follower_tells_why_it_failed(play) -> None:
    """Nobody is left who could be the cause instead, and none waits for ever."""
    failure = """
say(type="failed", code="model_load_error", message="no memory")
sys.exit(14)
"""
    assert lost(play(failure, size=2)).endswith(": no memory")


def test_a_follower_that_dies_takes_all_along(play) -> None:
    ranks = play(LOADS)
    ranks.wait(Stage.READY)
    told: list[str] = []
    ranks.on_lost(told.append)
    os.kill(ranks.pids[1], signal.SIGKILL)
    reason = lost(ranks)
    assert "rank 2 of 3" in reason
    assert "was killed by SIGKILL, as by a host that is out of memory" in reason
    wait_until_sync(lambda: gone(ranks), what="the end of the others")
    assert told == [reason]
    ranks.on_lost(told.append)  # afterwards: at once
    assert told == [reason, reason]


def test_the_cause_is_named_and_not_who_fell_with_it(play, tmp_path) -> None:
    """Rank 1 says first that it cannot go on: because rank 2 is about to die."""
    said = str(tmp_path / "said")
    script = f"""
if rank == 1:
    say(type="failed", code="group_lost", message="peer is gone")
    open({said!r}, "w").close()
while not os.path.exists({said!r}):
    time.sleep(0.01)
if rank == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
{LOADS}
"""
    reason = lost(play(script))
    assert "rank 2 of 3" in reason
    assert "SIGSEGV" in reason


def test_a_stopped_follower_is_lost_and_killed(play) -> None:
    ranks = play(LOADS, silence_s=1.5)
    ranks.wait(Stage.READY)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    assert "rank 1 of 3" in lost(ranks)
    assert "gave no sign of life for 1.5 s" in lost(ranks)
    wait_until_sync(lambda: gone(ranks), what="the end of all")


LEADER = """
import os, sys
from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.workers.rank_order import RankOrder, orders
from tokenmill.workers.rank_reports import Stage
from tokenmill.workers.ranks import Ranks
script = sys.argv[1]
worker = WorkerConfig()
first = RankOrder(group="w", rank=1, size=3, leader=os.getpid(), path="",
    model=ModelConfig(name="m", tp=3), worker=worker, backend="gloo",
    rendezvous="", alive_s=0.05)
ranks = Ranks(orders(first, worker, (1, 1, 1)), silence_s=1.5,
    command=(sys.executable, "-c", script))
ranks.start()
ranks.wait(Stage.READY)
print(*ranks.pids, flush=True)
for _ in sys.stdin:
    print(ranks.lost, flush=True)
"""


@pytest.fixture
def lead() -> Iterator[object]:
    """Starts a process that leads ranks; returns it and its followers."""
    made: list[subprocess.Popen[str]] = []

    def start(script: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        leader = subprocess.Popen(
            [sys.executable, "-c", LEADER, PLAYER + script],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.append(leader)
        followers = [psutil.Process(int(n)) for n in leader.stdout.readline().split()]
        assert len(followers) == 2
        return leader, followers

    yield start
    for leader in made:
        leader.kill()
        leader.communicate()


def test_a_leader_that_was_stopped_itself_blames_nobody(lead) -> None:
    """Its followers were alive all the time; what they sent is read before judging."""
    leader, _ = lead(LOADS)
    leader.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 2.0
    wait_until_sync(lambda: time.monotonic() > end)  # longer than a rank may be silent
    leader.send_signal(signal.SIGCONT)
    end = time.monotonic() + 0.5
    wait_until_sync(lambda: time.monotonic() > end)  # several looks at the ranks
    leader.stdin.write("?\n")
    leader.stdin.flush()
    assert leader.stdout.readline() == "None\n"


DEAF = """
from tokenmill.shared.pool.orphans import end_with
assert end_with(order["leader"], signal.SIGKILL)
threading.Thread(target=live, daemon=True).start()
reach(1, 2)
time.sleep(600)
"""
"""Never looks at its input, as one that hangs in native code."""


@pytest.mark.parametrize("script", [LOADS, DEAF], ids=["by its input", "by the kernel"])
def test_no_follower_outlives_a_killed_leader(lead, script: str) -> None:
    leader, followers = lead(script)
    leader.kill()
    leader.wait()
    assert all_gone(followers)


def test_an_orphan_is_told_that_it_is_one() -> None:
    """Its leader died before it could ask to end with it."""
    code = (
        "import signal; from tokenmill.shared.pool.orphans import end_with; "
        "print(end_with(1 << 22, signal.SIGKILL))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "False\n"


def test_work_that_waits_for_a_lost_rank_is_left_behind(play) -> None:
    ranks = play(LOADS)
    ranks.wait(Stage.READY)
    never = threading.Event()

    def work() -> None:
        os.kill(ranks.pids[0], signal.SIGKILL)
        never.wait(60)

    began = time.monotonic()
    with pytest.raises(ModelLoadError, match="rank 1 of 3"):
        ranks.run(work)
    assert time.monotonic() - began < 30
    never.set()


def test_an_error_of_the_leader_comes_second_to_a_lost_rank(play) -> None:
    ranks = play(LOADS)
    ranks.wait(Stage.READY)
    with pytest.raises(ZeroDivisionError):
        ranks.run(lambda: 1 // 0)

    def work() -> None:
        os.kill(ranks.pids[1], signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

    with pytest.raises(ModelLoadError, match="rank 2 of 3"):
        ranks.run(work)


def test_a_failed_step_of_the_leader_ends_all(play) -> None:
    ranks = play(LOADS)
    ranks.wait(Stage.READY)
    ranks.fail("a step of the group failed: out of memory")
    assert ranks.lost == "a step of the group failed: out of memory"
    wait_until_sync(lambda: gone(ranks), what="the end of all")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('hello', flush=True); follow()", "sent what is no report"),
        ("exit(3)", "ended with exit code 3"),
    ],
)
def test_a_follower_that_talks_nonsense_or_leaves_is_lost(play, script, reason) -> None:
    ranks = play(script)
    with pytest.raises(ModelLoadError, match=reason):
        ranks.wait(Stage.READY)


def test_a_program_that_is_not_there_is_an_error(play) -> None:
    worker = WorkerConfig()
    first = RankOrder(
        group="w", rank=1, size=2, leader=1, path="", model=ModelConfig(name="m", tp=2),
        worker=worker, backend="gloo", rendezvous="", alive_s=1.0,
    )  # fmt: skip
    ranks = Ranks(orders(first, worker, (1, 1)), silence_s=1.0, command=("/no/such",))
    ranks.start()
    with pytest.raises(ModelLoadError, match="could not be started"):
        ranks.wait(Stage.ARRIVED)
    ranks.close()
