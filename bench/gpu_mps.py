"""The real MPS, where it is: daemon, two clients in halves, a fault, the end.

Everything else of MPS is tested against a stand-in (tests/support/mps_stand_in.py).
This stage asks NVIDIA's own program, on the first device that is visible.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenmill.shared.config_mps import MpsConfig
from tokenmill.shared.cuda_devices import devices_here
from tokenmill.shared.mps import (
    DeviceSet,
    client_environment,
    directories,
    find_control,
    why_not,
)
from tokenmill.workers.mps import Daemon
from tokenmill.workers.mps_control import ACTIVE, FAULT, Control

Row = dict[str, object]
_CLIENT = Path(__file__).with_name("gpu_mps_client.py")
_CLIENT_S = 40.0
_SETTLE_S = 15.0


def stage(facts: Row, _deadline: float) -> Iterator[Row]:
    """Yields what was seen of MPS, or why there is nothing to see."""
    settings = MpsConfig(check_s=0.2)
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        pipes, logs = directories(Path(directory), (0,))
        devices = devices_here(os.environ)[:1]
        reason = "the smoke run has no device" if facts["smoke"] else None
        reason = reason or why_not(settings, devices, pipes)
        if reason is not None or not devices:
            yield {"what": "mps", "skipped": reason or "no device is here"}
            return
        one = DeviceSet(
            numbers=(0,), devices=devices, pipes=pipes, logs=logs, is_ours=True
        )
        program = find_control(settings)
        assert program is not None
        yield from _rows(one, Daemon.of(one, program, settings), program)


def _rows(one: DeviceSet, daemon: Daemon, program: Path) -> Iterator[Row]:
    control = Control(program, one.pipes)
    began = time.perf_counter()
    asyncio.run(daemon.start())
    try:
        servers = control.servers() or ()
        yield {
            "what": "mps daemon",
            "start_s": time.perf_counter() - began,
            "status": servers[0].status if servers else "no server",
            "agrees": bool(servers),
        }
        yield from _shared(one, control)
        yield from _fault(one, control)
    finally:
        asyncio.run(daemon.stop())
    yield {"what": "mps quit", "agrees": control.servers() is None}


def _shared(one: DeviceSet, control: Control) -> Iterator[Row]:
    """One client alone, then two at once, each within half of the device."""
    half = _start(one, "work", 0.5)
    alone = _said(half)
    pair = [_start(one, "work", 0.5) for _ in range(2)]
    seen = _most_clients(control, pair)
    both = [_said(process) for process in pair]
    whole_mib = one.devices[0].memory_mib or 0
    yield {
        "what": "mps clients in halves",
        "alone_ms": alone.get("ms"),
        "together_ms": max(float(said.get("ms", 0.0)) for said in both),
        "clients_seen": seen,
        "free_mib": alone.get("free_mib"),
        "multiprocessors": alone.get("multiprocessors"),
        "agrees": seen == 2 and 0 < float(alone.get("free_mib", 0)) <= whole_mib / 2,
    }


def _fault(one: DeviceSet, control: Control) -> Iterator[Row]:
    """A client's fatal error: what the server says, and whether it recovers."""
    before = {server.pid for server in control.servers() or ()}
    idle, guilty = _start(one, "idle", 0.5), _start(one, "fault", 0.5)
    states: list[str] = []
    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end and FAULT not in states:
        found = control.servers()
        states += [server.status for server in found or ()]
        if found is not None and before - {server.pid for server in found}:
            states.append("ended")
            break
        time.sleep(0.1)
    for process in (idle, guilty):
        process.kill()
        process.wait()
    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end:
        found = control.servers()
        if found is not None and all(server.status == ACTIVE for server in found):
            break
        time.sleep(0.2)
    again = _said(_start(one, "work", 0.5))
    yield {
        "what": "mps fault",
        "states": " ".join(dict.fromkeys(states)),
        "works_again": "ms" in again,
        "agrees": "ms" in again and bool({FAULT, "ended"} & set(states)),
    }


def _start(one: DeviceSet, what: str, share: float) -> "subprocess.Popen[str]":
    env = {**os.environ, **client_environment(one, (0,), share)}
    command = [sys.executable, str(_CLIENT), what]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _said(process: "subprocess.Popen[str]") -> Row:
    try:
        out, _ = process.communicate(timeout=_CLIENT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return {}
    lines = out.strip().splitlines()
    return dict(json.loads(lines[-1])) if lines else {}


def _most_clients(control: Control, pair: list["subprocess.Popen[str]"]) -> int:
    most = 0
    while any(process.poll() is None for process in pair):
        servers = control.servers() or ()
        most = max([most, *(len(control.clients(server)) for server in servers)])
        time.sleep(0.05)
    return most
