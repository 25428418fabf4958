"""A bulk command whose processes are killed: each line is written, and once."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.bulk_pool import BulkPool, assert_answered, request, write_lines
from support.pools import UpProcess, all_gone, up
from support.waiting import wait_until_sync

LINES = 1000
SEED = 5
QUICK = {
    "TOKENMILL_WORKER_LEASE_MS": "1500",
    "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000",
}
"""A killed process is missed soon."""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "pool"
    made.mkdir()
    return made


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Command:
    """One `bulk run` after another, each killed when it has written a little more."""

    def __init__(self, pool: BulkPool, tmp_path: Path) -> None:
        self._pool = pool
        self._output = tmp_path / "out.jsonl"
        self._partial = tmp_path / "out.jsonl.partial"
        self._args = (tmp_path / "in.jsonl", "-o", self._output)
        write_lines(self._args[0], [request(number) for number in range(LINES)])

    def use(self, pool: BulkPool) -> None:
        self._pool = pool

    def run_until(self, more: int) -> bool:
        """Kills it after so many more bytes; returns whether it ended before that."""
        process = self._pool.start("run", *self._args, "--model", "echo", "--quiet")
        enough = size_of(self._partial) + more
        wait_until_sync(
            lambda: process.poll() is not None or size_of(self._partial) > enough,
            every_s=0.002,
            what="lines",
        )
        ended = process.poll() is not None
        process.kill()
        _, said = process.communicate()
        assert not ended or process.returncode == 0, said.decode()
        return ended

    def tear(self) -> None:
        """What a crash of the machine may leave: half a line that nobody recorded."""
        if self._partial.exists():
            with self._partial.open("ab") as file:
                file.write(b'{"id": 3, "te')

    def finish(self) -> Path:
        ran = self._pool.run(*self._args)
        assert ran.code == 0, ran.err
        return self._output


def test_command_worker_and_janitor_are_killed_again_and_again(
    tmp_path: Path, directory: Path
) -> None:
    chance = random.Random(SEED)
    with up(directory, janitor=True, **QUICK) as process:
        command = Command(BulkPool(process), tmp_path)
        for victim in ("worker-0", "janitor", ""):
            if command.run_until(chance.randrange(40_000)):
                break
            command.tear()
            if victim:
                os.kill(process.pids(victim)[-1], signal.SIGKILL)
        assert_answered(command.finish(), LINES)


def test_the_whole_pool_is_killed_with_the_command(
    tmp_path: Path, directory: Path
) -> None:
    # Slowly: the kill comes long before the last line.
    first = UpProcess(directory, janitor=True, engine="echo:20", **QUICK)
    family: list[psutil.Process] = []
    try:
        first.wait_ready()
        family = [psutil.Process(first.process.pid), *first.family()]
        command = Command(BulkPool(first), tmp_path)
        assert not command.run_until(10_000)
    finally:
        # The supervisor first: it would start the others again.
        for process in family or [psutil.Process(first.process.pid)]:
            process.kill()
        first.process.wait()
    assert all_gone(family)
    with up(directory, janitor=True, **QUICK) as second:
        command.use(BulkPool(second))
        assert_answered(command.finish(), LINES)


def test_redis_is_killed_under_a_command_that_waits_it_out(
    tmp_path: Path, directory: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(n) for n in range(LINES)])
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    with up(directory, janitor=True, engine="echo:5", **QUICK) as process:
        args = ("run", source, "-o", output, "--model", "echo", "--json")
        command = BulkPool(process).start(*args)
        wait_until_sync(lambda: size_of(partial), every_s=0.002, what="lines")
        os.kill(process.pids("redis")[-1], signal.SIGKILL)
        _, said = command.communicate(timeout=150)
        assert command.returncode == 0, said.decode()
    assert_answered(output, LINES)
