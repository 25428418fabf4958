"""A rank loads and tunes its part and no more, and refuses what the whole does."""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.calibrations import random_calibration
from support.ranks import Ranks
from support.step_driver import Sequence, StepDriver
from support.wide_models import save_wide_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.batch import ModelRunner
from tokenmill.workers.engine.model import room_check
from tokenmill.workers.engine.model.budget import FreeMemory
from tokenmill.workers.engine.model.inspection import Question, describe
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.parallel.shard import Shard

EXACT = {"weights": "float32", "kv": "float32", "num_blocks": 32}
STATUS = Path("/proc/self/status")


class LoneRank:
    """A rank that loads while its group is elsewhere: it agrees with itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.shard = Shard(rank, size)
        self.rank, self.size = rank, size

    def numbers(self, own: int) -> tuple[int, ...]:
        return (own,)


def settled_bytes() -> int:
    """The same, once all that is free was given back: it would be taken again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_bytes()


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file's, swapped out or not."""
    told = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return sum(int(told[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


@pytest.mark.skipif(not STATUS.is_file(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("weights", "share"), [("float32", 1.0), ("int8", 0.3)])
def test_a_rank_never_holds_the_whole_model(
    weights: str, share: float, tmp_path: Path
) -> None:
    path = save_wide_model(
        "llama",
        tmp_path,
        hidden_size=512,
        head_dim=64,
        intermediate_size=2048,
        num_hidden_layers=2,
        vocab_size=12288,
    )
    whole = (path / "model.safetensors").stat().st_size
    assert whole > 64 << 20
    first = save_wide_model("llama", tmp_path / "first")
    options = {"weights": weights, "kv": "float32", "num_blocks": 8, "threads": 1}
    load_runner(first, device="cpu", **options)  # what is imported now is kept, too
    before = peak = settled_bytes()

    def watch(_stage: str, _fraction: float) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    runner = load_runner(
        path, device="cpu", communicator=LoneRank(1, 4), progress=watch, **options
    )
    kept = settled_bytes() - before
    part = share * whole / 4
    assert 0.7 * part < kept < 1.3 * part
    # Beside it a tensor's part while it is read, converted and packed.
    largest = 12288 // 4 * 512 * 4
    assert peak - before < part + 4 * largest < 0.6 * whole
    assert runner.weights_version.endswith("+tp4")


def test_other_degrees_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    path = save_wide_model("qwen2", tmp_path)
    with pytest.raises(ModelLoadError, match="degrees that work are 1, 2, 4, 8"):
        load_runner(path, device="cpu", communicator=LoneRank(0, 3), **EXACT)


def test_shapes_are_those_of_the_whole_checkpoint(tmp_path: Path) -> None:
    path = save_wide_model("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] += 1
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"has shape .*83.* calls for .*84"):
        load_runner(path, device="cpu", communicator=LoneRank(1, 2), **EXACT)


def test_one_rank_is_the_untouched_path(tmp_path: Path) -> None:
    path = save_wide_model("llama", tmp_path)
    options = {"weights": "int8", "num_blocks": 32, "threads": 1, "device": "cpu"}
    plain = load_runner(path, **options)
    alone = load_runner(path, communicator=LoneRank(0, 1), **options)
    assert alone.weights_version == plain.weights_version
    assert not any("inner" in name for name, _ in alone.model.named_modules())
    assert torch.equal(logits(plain), logits(alone))


def test_one_rank_imports_nothing_distributed() -> None:
    code = (
        "import sys\n"
        "import tokenmill.workers.engine.model.load\n"
        "assert 'tokenmill.workers.engine.parallel.communicator' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral"])
def test_a_rank_folds_its_part_of_a_calibration(
    variant: str, size: int, tmp_path: Path
) -> None:
    """Scales cancel in float; those of INT8 help each rank as they help the whole."""
    path = save_wide_model(variant, tmp_path)
    calibration = random_calibration(path, "model.layers.1.mlp.down_proj")
    options = {"num_blocks": 32, "calibration": calibration}
    exact = logits(load_runner(path, threads=1, device="cpu", **EXACT))
    int8 = {"weights": "int8", "kv": "int8", **options}
    whole = logits(load_runner(path, threads=1, device="cpu", **int8))
    with Ranks(size, tmp_path / "rendezvous") as ranks:
        with ranks.serving(path, **{**EXACT, **options}) as runner:
            torch.testing.assert_close(logits(runner), exact, atol=2e-4, rtol=1e-4)
        with ranks.serving(path, **int8) as runner:
            split = logits(runner)
    worst = (whole - exact).norm()
    assert (split - exact).norm() < 1.5 * worst + 0.01 * exact.norm()


def test_offloaded_layers_are_split_alike(tmp_path: Path) -> None:
    path = save_wide_model("gpt2", tmp_path)
    exact = logits(load_runner(path, threads=1, device="cpu", **EXACT))
    with (
        Ranks(2, tmp_path / "rendezvous") as ranks,
        ranks.serving(path, offload_layers=1, **EXACT) as runner,
    ):
        torch.testing.assert_close(logits(runner), exact, atol=1e-4, rtol=1e-4)


def test_ranks_agree_on_the_smallest_pool(tmp_path: Path) -> None:
    path = save_wide_model("qwen3", tmp_path)
    whole = load_runner(path, threads=1, device="cpu", kv_memory_mb=2)
    with Ranks(2, tmp_path / "rendezvous") as ranks:
        sizes = [runner.num_blocks for runner in ranks.load(path, kv_memory_mb=2)]
        assert sizes == [whole.num_blocks] * 2  # half the heads in half the memory
        runners = ranks.each(
            lambda end: load_pool(path, end, kv_memory_mb=2 + 4 * end.rank)
        )
        assert runners == [whole.num_blocks] * 2


def test_a_host_with_room_for_one_part_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks share its memory: each looks before any of them reads."""
    path = save_wide_model("llama", tmp_path)
    taken = describe(path, Question(num_blocks=4))["weights_bytes"]
    options = {"num_blocks": 4, "kv": "int8"}
    free = FreeMemory(int(0.8 * taken["float32"]), "host")
    monkeypatch.setattr(room_check, "free_memory", lambda *_: free)
    with Ranks(2, tmp_path / "rendezvous") as ranks:
        assert ranks.load(path, weights="int8", **options)
        with pytest.raises(ModelLoadError, match="KV in 4 blocks for each of 2 ranks"):
            # Half of it would fit, and parts are copies even in the files' own type.
            ranks.load(path, weights="float32", **options)


def test_parts_of_different_weights_are_refused(tmp_path: Path) -> None:
    """As when a calibration is written while some ranks have looked for it."""
    path = save_wide_model("llama", tmp_path)
    found = random_calibration(path, "model.layers.1.mlp.down_proj")
    options = {"weights": "int8", "kv": "int8", "num_blocks": 8}
    with (
        Ranks(2, tmp_path / "rendezvous") as ranks,
        pytest.raises(ModelLoadError, match="changed while the ranks read it"),
    ):
        ranks.each(
            lambda end: load_pool(
                path, end, calibration=found if end.rank else None, **options
            )
        )


def load_pool(path: Path, end: object, **options: object) -> int:
    from support.ranks import load_in_turn

    return load_in_turn(path, end, device="cpu", threads=1, **options).num_blocks


def logits(runner: ModelRunner) -> torch.Tensor:
    sequence = Sequence(list(range(30, 75)), 1)
    StepDriver(runner, chunk=512).run([sequence])
    return sequence.logits[0]
