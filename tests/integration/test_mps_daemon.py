"""The MPS daemon's life, against a stand-in of its control program (no GPU)."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from support.mps_stand_in import NAME, UUIDS, ask, install, running
from support.pools import clean_environment
from support.waiting import wait_until, wait_until_sync

from tokenmill.shared.config_mps import MpsConfig
from tokenmill.shared.cuda_devices import Device
from tokenmill.shared.errors import ConfigError, MpsUnavailable
from tokenmill.shared.mps import EXPECTED, PIPES
from tokenmill.workers.cli_mps import run
from tokenmill.workers.mps import Daemon, keep
from tokenmill.workers.mps_control import Control, Server, lost
from tokenmill.workers.mps_watch import MpsWatch, joined

QUICK = MpsConfig(check_s=0.05, start_s=60.0)
DEVICE = Device(id=UUIDS[0], memory_mib=80_000)


@pytest.fixture
def mps_dir() -> Iterator[Path]:
    """Short, for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        yield Path(directory)


@pytest.fixture
def program(mps_dir: Path) -> Path:
    """The stand-in."""
    return install(mps_dir / "bin")


def control(program: Path) -> Control:
    return Control(program, program.parents[1] / "p", program.parents[1] / "log")


@asynccontextmanager
async def kept(program: Path, settings: MpsConfig = QUICK) -> AsyncIterator[Control]:
    """A daemon as `tokenmill mps run` keeps it, once it has a server."""
    asked, stopping = control(program), asyncio.Event()
    daemon = Daemon(asked, [DEVICE], settings)
    task = asyncio.create_task(keep(daemon, stopping))
    try:
        await wait_until(lambda: task.done() or asked.servers(), every_s=0.05)
        if task.done():
            await task
        yield asked
    finally:
        stopping.set()
        with contextlib.suppress(MpsUnavailable):
            await task


async def test_it_starts_answers_and_quits(program) -> None:
    async with kept(program) as asked:
        (server,) = asked.servers()
        assert server.status == "ACTIVE"
        seen = json.loads(ask(program, asked.pipes, "stand_in_seen"))
        assert seen == {
            "CUDA_VISIBLE_DEVICES": UUIDS[0],
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        assert asked.pipes.stat().st_mode & 0o777 == 0o700
        assert "start_server -uid" in (asked.logs / "control.log").read_text()
    assert "quit -t 5" in (asked.logs / "control.log").read_text()
    assert asked.servers() is None
    assert not psutil.pid_exists(server.pid)
    assert not (asked.pipes / "tokenmill.started").exists()


async def test_a_daemon_that_runs_already_is_used_and_left_alone(program) -> None:
    asked = control(program)
    with running(program, asked.pipes) as theirs:
        async with kept(program) as asked:
            assert asked.servers()
        assert theirs.poll() is None
        assert asked.servers()


async def test_what_a_killed_supervisor_left_is_taken_over(program) -> None:
    asked = control(program)
    with running(program, asked.pipes) as left:
        (asked.pipes / "tokenmill.started").write_text(json.dumps([UUIDS[0]]))
        async with kept(program):
            assert left.poll() is None
        assert left.wait(60) == 0
        assert asked.servers() is None


async def test_what_was_left_for_other_devices_is_replaced(program) -> None:
    asked = control(program)
    with running(program, asked.pipes) as left:
        (asked.pipes / "tokenmill.started").write_text(json.dumps([UUIDS[1]]))
        async with kept(program):
            assert left.poll() == 0
            seen = json.loads(ask(program, asked.pipes, "stand_in_seen"))
            assert seen["CUDA_VISIBLE_DEVICES"] == UUIDS[0]


async def test_a_dead_daemon_is_told_at_once(program) -> None:
    asked = control(program)
    daemon = Daemon(asked, [DEVICE], QUICK)
    await daemon.start()
    process = daemon._process
    assert process is not None
    process.kill()
    reason = await asyncio.wait_for(daemon.watch(), 60)
    assert "ended with exit code -9" in reason
    await daemon.stop()


async def test_a_program_that_ends_or_hangs_is_named(mps_dir) -> None:
    program = mps_dir / NAME
    program.write_text('#!/bin/sh\n[ "$1" = -f ] && exit 3\nexit 1\n')
    program.chmod(0o755)
    with pytest.raises(MpsUnavailable, match="ended with exit code 3"):
        await Daemon(Control(program, mps_dir / "p"), [DEVICE], QUICK).start()
    program.write_text('#!/bin/sh\n[ "$1" = -f ] && exec sleep 60\nexit 1\n')
    slow = MpsConfig(start_s=0.3, check_s=0.05)
    daemon = Daemon(Control(program, mps_dir / "p"), [DEVICE], slow)
    with pytest.raises(MpsUnavailable, match=r"did not answer within mps.start_s=0.3"):
        await daemon.start()
    assert daemon._process is not None
    daemon._process.kill()
    daemon._process.wait()


async def test_a_directory_that_cannot_be_made_is_named(program, mps_dir) -> None:
    (mps_dir / "file").touch()
    daemon = Daemon(Control(program, mps_dir / "file" / "p"), [DEVICE], QUICK)
    with pytest.raises(MpsUnavailable, match=r"file/p cannot be made.*state_dir"):
        await daemon.start()


async def test_the_compute_mode_is_set_only_when_told_and_given_back(
    program, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    said = program.parent / "modes-set"
    async with kept(program):
        pass
    assert not said.exists()
    async with kept(program, MpsConfig(check_s=0.05, exclusive=True)):
        assert said.read_text().split() == ["-i", UUIDS[0], "-c", "EXCLUSIVE_PROCESS"]
    assert said.read_text().splitlines()[-1] == f"-i {UUIDS[0]} -c DEFAULT"


async def test_a_mode_that_a_killed_process_left_is_given_back(
    program, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    said = program.parent / "modes-set"
    killed = Daemon(control(program), [DEVICE], MpsConfig(exclusive=True))
    await killed.start()
    assert killed._process is not None
    killed._process.kill()
    killed._process.wait()
    assert len(said.read_text().splitlines()) == 1
    # By then nvidia-smi tells the mode that was set.
    now = Device(id=DEVICE.id, compute_mode="Exclusive_Process")
    again = Daemon(control(program), [now], MpsConfig(exclusive=True))
    await again.start()
    assert len(said.read_text().splitlines()) == 1
    await again.stop()
    assert said.read_text().splitlines()[-1] == f"-i {UUIDS[0]} -c DEFAULT"
    assert not (control(program).pipes / "tokenmill.modes").exists()


async def test_a_mode_that_cannot_be_set_is_refused(program, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    (program.parent / "nvidia-smi").write_text("#!/bin/sh\necho no rights; exit 4\n")
    daemon = Daemon(control(program), [DEVICE], MpsConfig(exclusive=True))
    with pytest.raises(ConfigError, match=r"mps.exclusive.*no rights; run as root"):
        await daemon.start()


def test_what_is_a_lost_server() -> None:
    active = (Server(7, "ACTIVE"),)
    assert lost((), active) is None
    assert lost(active, active) is None
    assert lost(active, (Server(7, "ACTIVE"), Server(8, "INITIALIZING"))) is None
    assert "fatal error" in (lost((), (Server(7, "FAULT"),)) or "")
    assert lost(active, ()) == "the MPS server 7 ended"
    assert lost(active, None) == "the MPS daemon does not answer"


async def test_a_worker_waits_for_its_daemon_and_notices_a_fault(program) -> None:
    settings = MpsConfig(control=str(program), check_s=0.05, start_s=60.0)
    pipes = control(program).pipes
    environ = {PIPES: str(pipes), EXPECTED: "on"}
    waiting = asyncio.create_task(joined(settings, environ))
    async with kept(program) as asked:
        watch = await asyncio.wait_for(waiting, 60)
        assert isinstance(watch, MpsWatch)
        losing = asyncio.create_task(watch.lost())
        (server,) = asked.servers()
        assert not losing.done()
        ask(program, pipes, f"stand_in_fault {server.pid}")
        assert "fatal error" in await asyncio.wait_for(losing, 60)
        # No new client is let in until the old ones are gone.
        assert not await watch.comes(0.0)
        ask(program, pipes, f"stand_in_recover {server.pid}")
        assert await watch.comes(60.0)


async def test_a_worker_ends_even_if_its_jobs_cannot_be_given_back(
    program, monkeypatch
) -> None:
    class Broken:
        async def give_up(self, _reason: str, *, counts: bool) -> None:
            assert not counts
            raise RuntimeError("of any kind")

    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with running(program, control(program).pipes):
        asked = control(program)
        assert asked.start_server()
        watch = MpsWatch(asked, 0.05)
        assert await watch.comes(60.0)
        (server,) = asked.servers()
        ask(program, asked.pipes, f"stand_in_fault {server.pid}")
        with pytest.raises(RuntimeError, match="of any kind"):
            await watch.guard(Broken())
    assert codes == [75]


async def test_a_server_that_dies_and_a_silent_daemon_are_losses(program) -> None:
    with running(program, control(program).pipes) as daemon:
        asked = control(program)
        assert asked.start_server()
        watch = MpsWatch(asked, 0.05)
        losing = asyncio.create_task(watch.lost())
        (server,) = asked.servers()
        await wait_until(lambda: watch.seen == (server,))
        os.kill(server.pid, signal.SIGKILL)
        assert "ended" in await asyncio.wait_for(losing, 60)
        losing = asyncio.create_task(MpsWatch(asked, 0.05).lost())
        daemon.kill()
        assert "does not answer" in await asyncio.wait_for(losing, 60)


async def test_a_server_that_is_replaced_while_a_model_loads_is_a_loss(program) -> None:
    with running(program, control(program).pipes):
        asked = control(program)
        assert asked.start_server()
        watch = MpsWatch(asked, 0.05)
        assert await watch.comes(60.0)
        (server,) = asked.servers()
        os.kill(server.pid, signal.SIGKILL)
        assert asked.start_server()
        assert "ended" in await asyncio.wait_for(watch.lost(), 60)


async def test_a_daemon_that_does_not_come(program) -> None:
    settings = MpsConfig(control=str(program), start_s=0.1)
    pipes = str(control(program).pipes)
    with pytest.raises(MpsUnavailable, match="no MPS daemon answers"):
        await joined(settings, {PIPES: pipes, EXPECTED: "on"})
    environ = {
        PIPES: pipes,
        EXPECTED: "auto",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "CUDA_VISIBLE_DEVICES": UUIDS[0],
    }
    assert await joined(settings, environ) is None
    assert environ[PIPES] == os.devnull  # CUDA goes without, too
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environ
    # A daemon's own numbers would mean other devices without it.
    renumbered = {PIPES: pipes, EXPECTED: "auto", "CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(MpsUnavailable, match="no MPS daemon answers"):
        await joined(settings, renumbered)
    assert await joined(settings, {PIPES: pipes}) is None


def test_the_command_runs_shows_and_stops_a_daemon(program) -> None:
    place = program.parents[1]
    env = {
        **clean_environment(),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "TOKENMILL_POOL_STATE_DIR": str(place),
        "TOKENMILL_MODELS": '[{"name":"a","devices":[0],"replicas":2}]',
        "TOKENMILL_MPS_CHECK_S": "0.1",
    }
    mill = (sys.executable, "-m", "tokenmill")
    process = subprocess.Popen(
        [*mill, "mps", "run", "--devices", "0"], env=env, stderr=subprocess.PIPE
    )
    pipes = place / "mps" / "0" / "pipe"
    try:
        wait_until_sync((pipes / "control").exists)
        wait_until_sync(lambda: Control(program, pipes).servers())
        shown = subprocess.run(
            [*mill, "mps", "status", "--json"], env=env, capture_output=True, check=True
        )
        (one,) = json.loads(shown.stdout)["sets"]
        assert one["devices"] == "0"
        assert one["answers"]
        assert one["servers"][0]["status"] == "ACTIVE"
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert Control(program, pipes).servers() is None


@pytest.mark.parametrize(
    ("devices", "says"),
    [("7", "no device 7: this host has 2"), ("0,", "as 0,1"), ("²", "as 0,1")],
)
async def test_the_command_names_what_is_no_device(
    program, monkeypatch, devices: str, says: str
) -> None:
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TOKENMILL_POOL_STATE_DIR", str(program.parents[1]))
    # Logging is set once a process.
    monkeypatch.setattr("tokenmill.shared.logging.configure", lambda *_: None)
    with pytest.raises(ConfigError, match=says):
        await run(devices)
