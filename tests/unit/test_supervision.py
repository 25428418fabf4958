"""Supervised processes: restarts, back-off, giving up, stopping."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

from tokenmill.shared.errors import ConfigError
from tokenmill.shared.pool import processes
from tokenmill.shared.pool.lock import StateLock
from tokenmill.shared.pool.output import Output
from tokenmill.shared.pool.processes import Child, ChildSpec, ChildState, Supervisor

SLEEP = "import time; time.sleep(60)"


class Nursery:
    """Children for a test, and what was heard of them."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[tuple[str, str]] = []
        self.states: list[ChildState] = []
        self.ended: list[dict[str, str]] = []
        self.output = Output(
            directory,
            lambda name, text: self.lines.append((name, text)),
            logs_too=False,
        )

    def child(self, code: str, **options: object) -> Child:
        spec = ChildSpec(
            name="child",
            command=(sys.executable, "-c", code),
            env=lambda: {"MARK": str(len(self.ended))},
            **options,
        )

        async def on_exit(_child: Child, env: dict[str, str]) -> None:
            self.ended.append(dict(env))

        return Child(spec, self.output, lambda c: self.states.append(c.state), on_exit)


@pytest.fixture
def nursery(tmp_path) -> Nursery:
    return Nursery(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(processes, "_FIRST_WAIT_S", 0.02)


async def test_a_child_that_dies_is_started_again_with_growing_waits(nursery) -> None:
    child = nursery.child("import sys; sys.exit(3)")
    task = asyncio.create_task(child.run())
    await wait_until(lambda: child.restarts >= 3)
    assert child.exit_code == 3
    assert child.retry_in_s > 0.02
    await child.stop(task)
    # Each incarnation had an environment of its own, and its end was told.
    assert [env["MARK"] for env in nursery.ended[:3]] == ["0", "1", "2"]


@pytest.mark.parametrize("code", [2])
async def test_bad_configuration_is_not_looped(nursery, code) -> None:
    child = nursery.child(f"import sys; sys.exit({code})")
    await asyncio.wait_for(child.run(), 60)
    assert child.state is ChildState.FAILED
    assert child.restarts == 0


async def test_a_model_that_cannot_be_loaded_is_given_up(nursery) -> None:
    child = nursery.child("import sys; sys.exit(14)")
    await asyncio.wait_for(child.run(), 60)
    assert child.state is ChildState.FAILED
    assert child.restarts == 2


async def test_tries_are_used_up_by_faults_of_its_own_alone(nursery) -> None:
    """Three starts while Redis is away are none."""
    ends = "import os, sys; sys.exit(3 if int(os.environ['MARK']) < 4 else 1)"
    child = nursery.child(ends, tries=2)
    await asyncio.wait_for(child.run(), 60)
    assert child.state is ChildState.FAILED
    assert child.restarts == 5


async def test_last_words_are_known_where_a_person_has_read_them(tmp_path) -> None:
    output = Output(tmp_path, lambda *_: None, logs_too=True)
    spec = ChildSpec(
        name="child",
        command=(sys.executable, "-c", "import sys; sys.exit('error: no')"),
        env=dict,
        tries=1,
    )
    await asyncio.wait_for(Child(spec, output, lambda _: None).run(), 60)
    assert output.tail("child") == []
    assert output.last_words("child") == ["error: no"]


async def test_stopping_asks_first(nursery) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    )
    child = nursery.child(code, grace_s=60.0)
    task = asyncio.create_task(child.run())
    await wait_until(lambda: ("child", "up") in nursery.lines)
    await child.stop(task)
    assert ("child", "bye") in nursery.lines
    assert child.exit_code == 0
    assert child.state is ChildState.STOPPED


async def test_a_child_that_will_not_end_is_killed(nursery) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    )
    child = nursery.child(code, grace_s=0.2)
    task = asyncio.create_task(child.run())
    await wait_until(lambda: ("child", "up") in nursery.lines)
    await child.stop(task)
    assert child.exit_code == -9


async def test_stopping_while_a_restart_is_due_starts_nothing(
    nursery, monkeypatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_WAIT_S", 30.0)
    child = nursery.child("import sys; sys.exit(1)")
    task = asyncio.create_task(child.run())
    await wait_until(lambda: len(nursery.ended) == 1)
    await asyncio.wait_for(child.stop(task), 20)
    assert child.pid is None
    assert len(nursery.ended) == 1


async def test_standard_error_goes_to_a_private_file(nursery) -> None:
    child = nursery.child("import sys; print('why', file=sys.stderr); sys.exit(2)")
    await asyncio.wait_for(child.run(), 60)
    assert nursery.output.tail("child") == ["why"]
    assert nursery.output.path("child").stat().st_mode & 0o777 == 0o600


async def test_children_are_in_sessions_of_their_own(nursery) -> None:
    child = nursery.child(SLEEP)
    supervisor = Supervisor([child])
    supervisor.start()
    pid = await wait_until(lambda: child.pid)
    assert os.getsid(pid) == pid
    await supervisor.stop(["child"])
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux")
def test_children_end_when_their_parent_is_killed(tmp_path) -> None:
    import signal
    import subprocess

    code = (
        "import subprocess, sys, time, signal\n"
        "from tokenmill.shared.pool.orphans import die_with_parent\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}],"
        " preexec_fn=die_with_parent(signal.SIGKILL))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(grandchild)


def gone(process: psutil.Process) -> bool:
    _, alive = psutil.wait_procs([process], timeout=60)
    return not alive or alive[0].status() == psutil.STATUS_ZOMBIE


def test_a_second_pool_in_the_same_directory_is_refused(tmp_path) -> None:
    first = StateLock(tmp_path)
    first.acquire()
    second = StateLock(tmp_path)
    with pytest.raises(ConfigError, match="a pool already runs"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
