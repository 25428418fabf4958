"""Which processes a pool consists of."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..config import Config, ModelConfig
from ..errors import ConfigError
from ..placing import Slot, slots_of
from .placement import Placement
from .processes import ChildSpec

GROUP_VARIABLE: Final = "TOKENMILL_PROC_GROUP"
"""Names a worker's incarnation, so that its leases can be forfeited when it dies."""
SUPERVISED_VARIABLE: Final = "TOKENMILL_PROC_SUPERVISED"
"""Tells a worker that we decide which versions run, and count how often they fail."""
ALLOCATOR_VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
GATEWAY: Final = "gateway"
"""Name of the child that speaks HTTP."""
_DRAIN_MARGIN_S: Final = 8.0
"""On top of `worker.drain_s` or `gateway.drain_s`: handing back, leaving, and a slow
machine."""
_MPS_GRACE_S: Final = 20.0
"""Servers end when their last clients have, and the daemon after them."""


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
        ConfigError: A model has fewer replicas than there are partitions, or cannot be
            placed on this host.
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
        children.append(_gateway(options, config, common))
    if options.with_workers:
        placement = Placement(config)
        placement.say()
        children += _mps(placement, common)
        children += plan_workers(
            options, config, url, console=console, placement=placement
        )
    return children


def _gateway(
    options: PoolOptions, config: Config, common: Mapping[str, str]
) -> ChildSpec:
    port, times = options.gateway_port, config.gateway
    given = () if port is None else ("--port", str(port))
    return ChildSpec(
        name=GATEWAY,
        command=_command("gateway", *given),
        env=_same(common),
        essential=False,
        grace_s=times.unready_s + times.drain_s + _DRAIN_MARGIN_S,
    )


def plan_workers(
    options: PoolOptions,
    config: Config,
    url: str,
    *,
    console: bool,
    models: Sequence[ModelConfig] | None = None,
    placement: Placement | None = None,
    prefix: str = "worker",
    extra: Sequence[str] = (),
) -> list[ChildSpec]:
    """Returns the worker processes of some models, one for each replica.

    Args:
        options: What was asked for.
        config: Settings in force.
        url: Redis, for the children.
        console: Whether a person reads the children's logs.
        models: Whose; None takes those of the settings. Others know no model but
            themselves.
        placement: Where the workers of the settings run; None finds it out.
        prefix: Of the children's names, which end in `-0`, `-1`...
        extra: Further options of `tokenmill work`.

    Raises:
        ConfigError: A model has fewer replicas than there are partitions, or cannot be
            placed on this host.
    """
    placement = placement or Placement(config)
    whose = config.models if models is None else tuple(models)
    slots = slots_of(whose)
    if models is not None:
        config = msgspec.structs.replace(config, models=whose)
    common = _environment(options, config, url, console=console)
    served = [model for model in whose for _ in range(model.replicas)]
    _check_partitions(config)
    return [
        ChildSpec(
            name=f"{prefix}-{number}",
            command=(*_work(options, config, model, slot), *extra),
            env=_own_group(
                {**common, **_gpu_memory(), **placement.environment(slot, model.name)}
            ),
            grace_s=config.worker.drain_s + _DRAIN_MARGIN_S,
        )
        for number, (model, slot) in enumerate(zip(served, slots, strict=True))
    ]


def check_plan(options: PoolOptions, config: Config) -> None:
    """Refuses a pool that cannot be, before anything of it is started.

    Args:
        options: What was asked for.
        config: Settings in force.

    Raises:
        ConfigError: As `plan_children`.
    """
    if options.with_workers:
        Placement(config)
        _check_partitions(config)


def _check_partitions(config: Config) -> None:
    partitions = config.pool.partitions
    for index, model in enumerate(config.models):
        if 0 < model.replicas < partitions:
            raise ConfigError(
                f"models[{index}].replicas",
                f"value {model.replicas}; expected at least pool.partitions "
                f"({partitions}), since each worker serves one partition",
            )


def _work(
    options: PoolOptions, config: Config, model: ModelConfig, slot: Slot
) -> tuple[str, ...]:
    command = _command("work", "--name", model.name, "--engine", options.engine)
    if options.profile is not None:
        command += ("--profile", str(options.profile.absolute()))
    if model.serves:
        command += ("--serves", model.serves[slot.replica])
    if slot.devices:
        # Without it a device that cannot be used would be replaced by the processor.
        command += ("--device", "cuda")
    partition = slot.replica % config.pool.partitions
    return (*command, "--partition", str(partition))


def _mps(placement: Placement, common: Mapping[str, str]) -> list[ChildSpec]:
    """One process for each set of devices that workers share and whose daemon is ours.

    It is not essential: workers that MPS was promised to say themselves what they lack.
    """
    return [
        ChildSpec(
            name=f"mps-{one.name.replace(',', '-')}",
            command=_command(
                *("mps", "run", "--devices", one.name),
                *("--pipes", str(one.pipes), "--logs", str(one.logs)),
            ),
            env=_same(common),
            essential=False,
            grace_s=_MPS_GRACE_S,
        )
        for one in placement.sets
        if one.is_ours
    ]


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
    return lambda: {
        **common,
        GROUP_VARIABLE: f"w-{os.getpid()}-{secrets.token_hex(8)}",
        SUPERVISED_VARIABLE: "1",
    }


def partition_of_worker(spec: ChildSpec) -> int:
    """The partition that a worker's command names."""
    return int(spec.command[spec.command.index("--partition") + 1])


def model_of_worker(spec: ChildSpec) -> str:
    """The model that a worker's command names."""
    return spec.command[spec.command.index("--name") + 1]
