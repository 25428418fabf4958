"""What `tokenmill doctor` and `tokenmill mps status` say of MPS."""

import os
from pathlib import Path

import msgspec

from ..shared.config import Config
from ..shared.errors import ConfigError
from ..shared.mps import DEFAULT_PIPES, PIPES, DeviceSet, find_control
from ..shared.placing import slots_of
from ..shared.pool.placement import Placement
from ..shared.redis import Finding
from .mps_control import FAULT, Control, Server


class SetState(msgspec.Struct, frozen=True, kw_only=True):
    """One set of shared devices."""

    devices: str
    """As `0,1`."""
    pipes: str
    answers: bool
    servers: tuple[Server, ...] = ()
    clients: int = 0


class MpsState(msgspec.Struct, frozen=True, kw_only=True):
    """Of all sets of devices that the settings share."""

    sets: tuple[SetState, ...] = ()
    off: dict[str, str] = {}
    """Set -> why MPS is not used for it."""
    why: str | None = None
    """Why there is nothing to share; None where there is."""


def state_of(config: Config) -> MpsState:
    """Returns where MPS is used on this host, where not, and why.

    Args:
        config: Settings in force.

    Raises:
        ConfigError: Devices are listed that are not here, or MPS is asked for and
            cannot be had.
    """
    placement = Placement(config)
    sets = tuple(_look(one, config) for one in placement.sets)
    if sets or placement.off:
        return MpsState(sets=sets, off=placement.off)
    slots = slots_of(config.models)
    if any(slot.devices for slot in slots):
        return MpsState(why="each device has one process, which owns it")
    others = len(slots) > 1 and config.worker.device != "cpu"
    hint = "; list them where several workers share a GPU" if others else ""
    found = _found(config)
    if found is not None:
        return MpsState(sets=(found,))
    return MpsState(why=f"no model lists devices{hint}")


def findings(config: Config) -> list[Finding]:
    """Returns the lines of `tokenmill doctor`.

    Args:
        config: Settings in force.
    """
    try:
        state = state_of(config)
    except ConfigError as error:
        return [Finding("error", "mps", str(error), "correct the setting")]
    if state.why is not None:
        return [Finding("info", "mps", f"off: {state.why}")]
    refused = [
        Finding(
            "info" if config.mps.mode == "off" else "warning",
            "mps",
            f"off for devices {devices}: {reason}; their processes take turns",
            "cure what it says, or set mps.mode to off",
        )
        for devices, reason in state.off.items()
    ]
    return [*refused, *map(_finding, state.sets)]


def _finding(one: SetState) -> Finding:
    if not one.answers:
        text = f"devices {one.devices}: no daemon answers yet; tokenmill up starts it"
        return Finding("info", "mps", text)
    servers = ", ".join(f"server {s.pid} {s.status}" for s in one.servers)
    text = (
        f"on for devices {one.devices}: {servers or 'no server yet'}, {one.clients} "
        f"clients, pipes in {one.pipes}"
    )
    if any(server.status == FAULT for server in one.servers):
        cure = "it recovers when all its clients have ended; workers end by themselves"
        return Finding("warning", "mps", text, cure)
    return Finding("info", "mps", text)


def _look(one: DeviceSet, config: Config) -> SetState:
    program = find_control(config.mps)
    assert program is not None, "a set without the program is not shared"
    return _asked(Control(program, one.pipes), one.name)


def _found(config: Config) -> SetState | None:
    """A daemon that the environment names, as in a container beside one."""
    program = find_control(config.mps)
    pipes = Path(os.environ.get(PIPES) or DEFAULT_PIPES)
    if program is None or not (pipes / "control").exists():
        return None
    state = _asked(Control(program, pipes), "of the environment")
    return state if state.answers else None


def _asked(control: Control, devices: str) -> SetState:
    servers = control.servers()
    return SetState(
        devices=devices,
        pipes=str(control.pipes),
        answers=servers is not None,
        servers=servers or (),
        clients=sum(len(control.clients(server)) for server in servers or ()),
    )
