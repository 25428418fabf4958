"""What a worker that is to be split refuses, and how a rank's own words reach it."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
from support.fault_pool import with_faults
from support.tiny_models import save_tiny_model

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ConfigError, ModelLoadError
from tokenmill.workers import rank_group, rank_process
from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.loading import load
from tokenmill.workers.rank_place import choose_place
from tokenmill.workers.rank_reports import Failed
from tokenmill.workers.runner_loading import load_model_runner

WORKER = WorkerConfig(device="cpu", threads=2, kv_memory_mb=16)


def split(path: Path, tp: int) -> ModelConfig:
    return ModelConfig(name="m", path=str(path), tp=tp)


def test_a_degree_that_does_not_divide_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = split(save_tiny_model("llama", tmp_path), 4)
    monkeypatch.setattr(rank_group, "Ranks", None)
    with pytest.raises(ConfigError, match="degrees that work are 1, 2, 6") as told:
        load("model", model, WORKER)
    assert told.value.exit_code == 2


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="each rank needs a CUDA device of its own"):
        choose_place("cuda", 64)
    assert choose_place("cpu", 64).backend == "gloo"


def test_what_ranks_cannot_do_is_said_at_once() -> None:
    model = ModelConfig(name="m", path="/no/such", tp=2)
    with pytest.raises(ConfigError, match="profile it with tp = 1"):
        load("model", model, WorkerConfig(), profile=Path("p.json"))
    assert load("echo", model, WorkerConfig()).tp == 1


STEP = StepBatch(
    np.array([5, 6]), np.array([0, 1]), (SequenceSlice(0, 2, 2, (0,)),), np.array([1])
)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no memory", r"rank 1 of 2 \(pid \d+\): MemoryError: injected: no memory"),
        ("hang", r"rank 1 of 2 \(pid \d+\) did not answer the others: a step of the"),
    ],
)
def test_a_step_that_fails_on_one_rank_alone_is_that_ranks_fault(
    fault: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, or hanging while its process gives signs of life."""
    for name, value in {**with_faults(), "RANK_FAULT": fault}.items():
        monkeypatch.setenv(name, value)
    path = save_tiny_model("llama", tmp_path)
    worker = msgspec.structs.replace(WORKER, rank_timeout_s=3.0)
    group = rank_group.RankGroup.start(path, split(path, 2), worker)
    runner = group.load(partial(load_model_runner, path, split(path, 2)))
    began = time.monotonic()
    with pytest.raises(SystemExit, match="75"):
        runner.run(STEP)
    assert time.monotonic() - began < 2 * worker.rank_timeout_s + 30
    assert re.match(told, str(group.ranks.lost))
    group.close()
    assert not any(map(psutil.pid_exists, group.ranks.pids))


def test_what_a_follower_lacks_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Failed] = []

    def follow(*_given: object) -> None:
        raise ModelLoadError("no such file")

    monkeypatch.setattr(rank_process, "_follow", follow)
    reports = SimpleNamespace(send=told.append)
    assert rank_process._work(SimpleNamespace(), reports, SimpleNamespace()) == 14
    assert told == [Failed("model_load_error", "no such file")]
