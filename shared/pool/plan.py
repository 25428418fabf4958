"""Which processes a pool consists of."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from ..config import Config
from ..errors import ConfigError
from .processes import ChildSpec

GROUP_VARIABLE: Final = "TOKENMILL_PROC_GROUP"
"""Names a worker's incarnation, so that its leases can be forfeited when it dies."""
ALLOCATOR_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
GATEWAY: Final = "gateway"
"""Name of the child that speaks HTTP."""
_DRAIN_MARGIN_S: Final = 8.0
"""On top of `worker.drain_s` or `gateway.drain_s`: handing back, leaving, and a slow
machine."""


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `tokenmill up` was asked for, beyond the settings."""

    config_path: Path | None = None
    engine: str = "model"
    num_schedulers: int = 1
    """Active one included; further ones stand by."""
    with_workers: bool = True
    with_janitor: bool = True
    with_gateway: bool = False
    gateway_port: int | None = None
    """None takes the setting; 0 is a free one."""
    profile: Path | None = None
    """Directory to which workers time their steps."""


def plan_children(
    options: PoolOptions, config: Config, url: str, *, console: bool
) -> list[ChildSpec]:
    """Returns every process of the pool besides Redis.

    Args:
        options: What was asked for.
        config: Settings in force.
        url: Redis, for the children.
        console: Whether a person reads the children's logs.

    Raises:
        ConfigError: A model has fewer replicas than there are partitions.
    """
    common = _environment(options, config, url, console=console)
    fixed = _same(common)
    children = [
        ChildSpec(
            name="scheduler" if index == 0 else f"standby-{index}",
            command=_command("schedule", *(("--standby",) if index else ())),
            env=fixed,
            essential=index == 0,
        )
        for index in range(options.num_schedulers)
    ]
    if options.with_janitor:
        children.append(
            ChildSpec(
                name="janitor", command=_command("janitor"), env=fixed, essential=False
            )
        )
    if options.with_gateway:
        port = options.gateway_port
        given = () if port is None else ("--port", str(port))
        children.append(
            ChildSpec(
                name=GATEWAY,
                command=_command("gateway", *given),
                env=fixed,
                essential=False,
                grace_s=(
                    config.gateway.unready_s + config.gateway.drain_s + _DRAIN_MARGIN_S
                ),
            )
        )
    if options.with_workers:
        children += _workers(options, config, common)
    return children


def _workers(
    options: PoolOptions, config: Config, common: Mapping[str, str]
) -> list[ChildSpec]:
    partitions = config.pool.partitions
    specs: list[ChildSpec] = []
    for index, model in enumerate(config.models):
        if 0 < model.replicas < partitions:
            raise ConfigError(
                f"models[{index}].replicas",
                f"value {model.replicas}; expected at least pool.partitions "
                f"({partitions}), since each worker serves one partition",
            )
        for replica in range(model.replicas):
            command = _command("work", "--name", model.name, "--engine", options.engine)
            if options.profile is not None:
                command += ("--profile", str(options.profile.absolute()))
            if model.serves:
                command += ("--serves", model.serves[replica])
            specs.append(
                ChildSpec(
                    name=f"worker-{len(specs)}",
                    command=(*command, "--partition", str(replica % partitions)),
                    env=_own_group({**common, **_gpu_memory()}),
                    grace_s=config.worker.drain_s + _DRAIN_MARGIN_S,
                )
            )
    return specs


def _command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tokenmill", *arguments)


def _environment(
    options: PoolOptions, config: Config, url: str, *, console: bool
) -> dict[str, str]:
    environment = {
        # A command line is public, so the password travels here.
        "TOKENMILL_URL": url,
        "TOKENMILL_MODELS": msgspec.json.encode(config.models).decode(),
        "PYTHONUNBUFFERED": "1",
    }
    if options.config_path is not None:
        environment["TOKENMILL_CONFIG"] = str(options.config_path.absolute())
    if console and config.log.format == "auto":
        environment["TOKENMILL_LOG_FORMAT"] = "console"
    return environment


def _gpu_memory() -> dict[str, str]:
    """PyTorch's allocator grows segments instead of fragmenting, unless told otherwise.

    Of use on a GPU alone; workers on a CPU never read it.
    """
    if ALLOCATOR_VARIABLE in os.environ:
        return {}
    return {ALLOCATOR_VARIABLE: "expandable_segments:True"}


def _same(environment: Mapping[str, str]) -> Callable[[], Mapping[str, str]]:
    return lambda: environment


def _own_group(common: Mapping[str, str]) -> Callable[[], Mapping[str, str]]:
    """A fresh group at each start: a group is one incarnation."""
    return lambda: {**common, GROUP_VARIABLE: f"w-{os.getpid()}-{secrets.token_hex(8)}"}


def partition_of_worker(spec: ChildSpec) -> int:
    """The partition that a worker's command names."""
    return int(spec.command[spec.command.index("--partition") + 1])


def model_of_worker(spec: ChildSpec) -> str:
    """The model that a worker's command names."""
    return spec.command[spec.command.index("--name") + 1]
