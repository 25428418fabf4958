"""Who is told what of CUDA devices and MPS, and what MPS is refused for."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from support.mps_stand_in import UUIDS, install

from tokenmill.shared.config import Config, ModelConfig, MpsConfig, WorkerConfig
from tokenmill.shared.config_check import check
from tokenmill.shared.cuda_devices import devices_here
from tokenmill.shared.errors import ConfigError
from tokenmill.shared.mps import why_not
from tokenmill.shared.pool import placement
from tokenmill.shared.pool.placement import Placement
from tokenmill.shared.pool.plan import (
    SUPERVISED_VARIABLE,
    PoolOptions,
    plan_children,
    plan_workers,
)
from tokenmill.shared.pool.up import Pool
from tokenmill.workers.cli import work
from tokenmill.workers.cli_mps import status
from tokenmill.workers.mps_health import MpsState, findings

HALF = ModelConfig(name="a", devices=(0,), share=0.5)


@pytest.fixture
def mps_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory for state, stand-ins on PATH, no word of CUDA yet."""
    for name in [name for name in os.environ if name.startswith("CUDA_")]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        install(Path(directory) / "bin")
        monkeypatch.setenv("PATH", f"{directory}/bin:{os.environ['PATH']}")
        yield Path(directory)


def pool(place: Path, *models: ModelConfig, **mps: object) -> Config:
    config = Config(models=models, mps=MpsConfig(**mps))
    state = type(config.pool)(state_dir=str(place))
    config = type(config)(models=models, mps=config.mps, pool=state)
    check(config, {})
    return config


def told(config: Config) -> dict[str, dict[str, str]]:
    children = plan_children(PoolOptions(), config, "redis://host", console=False)
    return {child.name: dict(child.env()) for child in children}


def commands(config: Config) -> dict[str, tuple[str, ...]]:
    children = plan_children(PoolOptions(), config, "redis://host", console=False)
    return {child.name: child.command for child in children}


def test_two_processes_of_a_device_are_clients_within_their_shares(mps_place) -> None:
    other = ModelConfig(name="b", devices=(0,), share=0.25)
    config = pool(mps_place, HALF, other)
    env = told(config)["worker-0"]
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(mps_place / "mps" / "0" / "pipe")
    assert env["CUDA_MPS_LOG_DIRECTORY"] == str(mps_place / "mps" / "0" / "log")
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{UUIDS[0]}=40000M"
    assert env["CUDA_VISIBLE_DEVICES"] == UUIDS[0]
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert told(config)["worker-1"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    run = commands(config)
    assert run["mps-0"][-7:] == (
        *("run", "--devices", "0"),
        *("--pipes", env["CUDA_MPS_PIPE_DIRECTORY"]),
        *("--logs", env["CUDA_MPS_LOG_DIRECTORY"]),
    )
    assert run["worker-0"][run["worker-0"].index("--device") + 1] == "cuda"


def test_threads_may_be_given_twice_and_memory_may_not(mps_place) -> None:
    other = ModelConfig(name="b", devices=(0,), share=0.25)
    children = told(pool(mps_place, HALF, other, thread_factor=3.0))
    shares = [
        children[name]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
        for name in ("worker-0", "worker-1")
    ]
    assert shares == ["100", "75"]
    memory = children["worker-1"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
    assert memory == f"{UUIDS[0]}=20000M"
    with pytest.raises(ConfigError, match=r"thread_factor.*from 1 to 64"):
        pool(mps_place, HALF, thread_factor=0.5)


def test_a_process_that_owns_its_device_needs_no_mps(mps_place) -> None:
    each = ModelConfig(name="a", devices=(0, 1), replicas=2, share=0.5)
    config = pool(mps_place, each)
    children = told(config)
    assert not any(name.startswith("mps") for name in children)
    env = children["worker-1"]
    assert env["CUDA_VISIBLE_DEVICES"] == UUIDS[1]
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in env
    # A daemon that happens to run is not found by accident.
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == os.devnull
    assert "owns it" in findings(config)[0].message


def test_ranks_on_two_devices_share_them_with_a_third_process(mps_place) -> None:
    split = ModelConfig(name="t", devices=(0, 1), tp=2)
    config = pool(mps_place, split, ModelConfig(name="a", devices=(1,)))
    children = told(config)
    assert children["worker-0"]["CUDA_VISIBLE_DEVICES"] == ",".join(UUIDS)
    pipes = {children[f"worker-{n}"]["CUDA_MPS_PIPE_DIRECTORY"] for n in (0, 1)}
    assert pipes == {str(mps_place / "mps" / "0-1" / "pipe")}
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in children["worker-0"]


def test_without_uuids_a_server_s_own_numbers_are_told(mps_place, monkeypatch) -> None:
    (mps_place / "bin" / "nvidia-smi").unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    config = pool(
        mps_place,
        ModelConfig(name="a", devices=(1,)),
        ModelConfig(name="b", devices=(1,), share=0.5),
    )
    env = told(config)["worker-1"]
    assert env["CUDA_VISIBLE_DEVICES"] == "0"  # the only one of its daemon
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in env  # nobody knows the whole
    alone = pool(mps_place, ModelConfig(name="a", devices=(1,)))
    assert told(alone)["worker-0"]["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize(
    ("visible", "number", "says"),
    [
        (None, 2, "no device 2: this host has 2, numbered from 0"),
        ("1", 1, "no device 1: this host has 1"),
        ("1,7", 1, "no device 1: this host has 1"),
        ("-1,1", 0, "no NVIDIA device is here"),
        ("", 0, "no device 0: no NVIDIA device is here"),
        ("-1", 0, "no NVIDIA device is here"),
    ],
)
def test_an_unknown_device_is_refused(
    mps_place, monkeypatch, visible, number, says
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = pool(mps_place, ModelConfig(name="a", devices=(number,)))
    with pytest.raises(ConfigError, match=says):
        Placement(config)


def test_devices_and_a_worker_on_the_cpu_contradict_each_other(mps_place) -> None:
    config = Config(models=(HALF,), worker=WorkerConfig(device="cpu"))
    with pytest.raises(ConfigError, match=r"worker\.device is cpu"):
        Placement(config)


def test_visible_devices_name_others_by_number_or_uuid(mps_place) -> None:
    def ids(visible: str) -> list[str]:
        return [one.id for one in devices_here({"CUDA_VISIBLE_DEVICES": visible})]

    assert ids("1,0") == [UUIDS[1], UUIDS[0]]
    assert ids("GPU-bbbb") == [UUIDS[1]]
    (instance,) = devices_here({"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    assert instance.mig


def test_a_device_for_one_process_is_not_shared_without_mps(mps_place) -> None:
    install(mps_place / "bin", mode="Exclusive_Process")
    assert Placement(both(mps_place)).sets
    with pytest.raises(ConfigError, match=r"mps.mode.*device 0.*Exclusive_Process"):
        Placement(both(mps_place, mode="off"))
    Placement(pool(mps_place, HALF, mode="off"))  # one process alone


def both(place: Path, **mps: object) -> Config:
    return pool(place, HALF, ModelConfig(name="b", devices=(0,)), **mps)


def refusal(config: Config) -> str:
    placed = Placement(config)
    assert placed.sets == ()
    return placed.off["0"]


def test_mps_is_refused_where_it_cannot_be_had(mps_place, monkeypatch) -> None:
    assert refusal(both(mps_place, mode="off")) == "mps.mode is off"
    wrong = both(mps_place, control=str(mps_place / "none"))
    assert "there is no" in refusal(wrong)
    install(mps_place / "bin", mig=True)
    assert "MIG mode" in refusal(both(mps_place))
    install(mps_place / "bin", mode="Prohibited")
    assert "compute mode Prohibited" in refusal(both(mps_place))
    install(mps_place / "bin")
    assert Placement(both(mps_place)).off == {}
    deep = mps_place / ("d" * 90)
    assert "bytes" in refusal(both(deep))
    monkeypatch.setattr("sys.platform", "darwin")
    assert "on Linux" in refusal(both(mps_place))


def test_a_daemon_of_another_user_is_refused(mps_place, monkeypatch) -> None:
    pipes = mps_place / "pipe"
    pipes.mkdir()
    (pipes / "control").touch()
    mine = os.getuid()
    assert why_not(MpsConfig(), (), pipes) is None
    monkeypatch.setattr("os.getuid", lambda: mine + 1)
    os.chown(pipes / "control", mine + 2, -1) if mine == 0 else None
    reason = why_not(MpsConfig(), (), pipes)
    assert reason is not None
    assert "one user at a time" in reason


def test_asked_for_and_not_to_be_had_ends_the_start(mps_place) -> None:
    install(mps_place / "bin", mig=True)
    with pytest.raises(ConfigError, match=r"mps.mode.*'on'.*MIG mode"):
        Placement(both(mps_place, mode="on"))
    (found,) = findings(both(mps_place, mode="on"))
    assert found.severity == "error"


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_asked_for_without_a_cuda_device_ends_the_start(
    mps_place, monkeypatch, device
) -> None:
    monkeypatch.setattr(placement, "devices_here", lambda _: ())
    config = msgspec.structs.replace(
        pool(mps_place, ModelConfig(name="a", replicas=2), mode="on"),
        worker=WorkerConfig(device=device),
    )
    with pytest.raises(ConfigError, match=r"mps.mode.*'on', and .* set it to auto"):
        Placement(config)
    (found,) = findings(config)
    assert found.severity == "error"


def test_asked_for_needs_the_devices_that_are_shared_or_a_daemon(mps_place) -> None:
    config = pool(mps_place, ModelConfig(name="a", replicas=2), mode="on")
    with pytest.raises(ConfigError, match=r"no model lists devices"):
        Placement(config, {"CUDA_MPS_PIPE_DIRECTORY": str(mps_place / "none")})
    (mps_place / "control").touch()
    Placement(config, {"CUDA_MPS_PIPE_DIRECTORY": str(mps_place)})
    Placement(pool(mps_place, ModelConfig(name="a", devices=(0,)), mode="on"))


@pytest.mark.parametrize(
    "model",
    [ModelConfig(name="a", devices=(77,)), ModelConfig(name="a", replicas=2)],
)
async def test_what_cannot_be_placed_is_refused_before_anything_starts(
    mps_place, model
) -> None:
    config = pool(mps_place / "state", model, mode="on")
    with pytest.raises(ConfigError):
        await Pool(PoolOptions(), config, None).run()
    assert not (mps_place / "state").exists()


async def test_a_worker_by_itself_is_refused_before_redis_is_looked_for(
    mps_place, monkeypatch
) -> None:
    settings = mps_place / "settings.toml"
    settings.write_text('[mps]\nmode = "on"\n[worker]\ndevice = "cpu"\n')
    monkeypatch.delenv(SUPERVISED_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"mps.mode.*worker.device is cpu"):
        await work(url="redis://127.0.0.1:1", config=settings)


def test_status_keeps_debug_lines_from_the_terminal(
    mps_place, monkeypatch, capsys
) -> None:
    settings = mps_place / "settings.toml"
    settings.write_text("")

    def state(_: Config) -> MpsState:
        structlog.get_logger("t").debug("mps_silent")
        return MpsState(why="nothing is shared")

    monkeypatch.setattr("tokenmill.workers.mps_health.state_of", state)
    kept = structlog.get_config()
    structlog.reset_defaults()
    try:
        status(config=settings)
    finally:
        structlog.configure(**kept)
    shown = capsys.readouterr()
    assert shown.out == "off: nothing is shared\n"
    assert shown.err == ""


def test_doctor_says_why_mps_is_off(mps_place) -> None:
    assert findings(Config())[0].message == "off: no model lists devices"
    many = Config(models=(ModelConfig(name="a", replicas=2),))
    assert "list them" in findings(many)[0].message
    install(mps_place / "bin", mig=True)
    (found,) = findings(both(mps_place))
    assert found.severity == "warning"
    assert "MIG mode" in found.message
    assert findings(both(mps_place, mode="off"))[0].severity == "info"


def test_a_daemon_that_is_given_is_not_started(mps_place) -> None:
    config = both(mps_place, pipe_directory=str(mps_place / "theirs"))
    children = told(config)
    assert not any(name.startswith("mps") for name in children)
    env = children["worker-0"]
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(mps_place / "theirs")


def test_cores_are_told_to_workers_that_share_the_host(monkeypatch) -> None:
    monkeypatch.setattr(placement, "available_cores", lambda: (2, 3, 5, 7))
    models = (ModelConfig(name="a", share=0.5), ModelConfig(name="b", share=0.25))
    children = told(Config(models=models))
    assert children["worker-0"]["TOKENMILL_PROC_CORES"] == "2,3"
    assert children["worker-1"]["TOKENMILL_PROC_CORES"] == "5"
    assert "CUDA_VISIBLE_DEVICES" not in children["worker-0"]


def test_a_further_version_keeps_to_the_cores_of_its_model(monkeypatch) -> None:
    monkeypatch.setattr(placement, "available_cores", lambda: (2, 3, 5, 7))
    models = (
        ModelConfig(name="a", share=0.25, replicas=2),
        ModelConfig(name="b", share=0.25),
    )
    version = ModelConfig(name="a", version="v2", share=0.25, replicas=3)
    workers = plan_workers(
        *(PoolOptions(), Config(models=models), "redis://host"),
        console=False,
        models=[version],
    )
    cores = [worker.env()["TOKENMILL_PROC_CORES"] for worker in workers]
    assert cores == ["2", "3", "2"]
