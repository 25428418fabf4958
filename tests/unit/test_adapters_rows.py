"""Adapters in a loaded model: row by row, and not at all where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_adapters import save_tiny_adapter
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import EngineError, ModelLoadError
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import adapter_digest
from tokenmill.workers.engine.adapters.delta import KernelDelta, TorchDelta
from tokenmill.workers.engine.adapters.serving import serve_adapters
from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.kernels import ops
from tokenmill.workers.engine.model.device import Target, host_target
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.runner import TransformersRunner

LENGTHS = (5, 1, 17, 9)
MIB = 1 << 20


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("rows")
    return lambda variant: (
        root / variant if (root / variant).exists() else save_tiny_model(variant, root)
    )


def opened(
    base: Path, directory: Path, **options: object
) -> tuple[TransformersRunner, AdapterCache]:
    """A runner with two adapters, "a" on all layers and "b" on some."""
    options = {"weights": "int8", "kv": "float32", **options}
    runner = load_runner(base, num_blocks=32, threads=1, **options)
    cache = serve_adapters(runner, max_bytes=64 * MIB)
    some = ("v_proj", "down_proj", "c_attn", "query_key_value", "dense")
    for name, ends, seed in (("a", None, 1), ("b", some, 2)):
        path = directory / name
        if not path.exists():
            save_tiny_adapter(base, path, ends=ends, rank=3 * seed, seed=seed)
        cache.load(name, path, adapter_digest(path))
    return runner, cache


def step(adapters: tuple[str | None, ...], lengths: tuple[int, ...] = LENGTHS):
    """All of some prompts in one step; a prompt depends on its place alone."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, length) for length in lengths]
    slices, at = [], 0
    for index, prompt in enumerate(prompts):
        length = len(prompt)
        blocks = tuple(range(4 * index, 4 * index + -(-length // 8)))
        slices.append(SequenceSlice(at, length, length, blocks, length))
        at += length
    return StepBatch(
        token_ids=np.concatenate(prompts),
        positions=np.concatenate([np.arange(len(prompt)) for prompt in prompts]),
        slices=tuple(slices),
        logit_rows=np.arange(at),
        adapters=adapters,
    )


def rows_of(logits: torch.Tensor, index: int) -> torch.Tensor:
    start = sum(LENGTHS[:index])
    return logits[start : start + LENGTHS[index]]


VARIANTS = ("llama", "llama-tied", "qwen3", "mistral", "gpt2", "falcon-grouped")


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_without_an_adapter_keep_their_bits_beside_others(
    variant: str, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    runner, _ = opened(base_of(variant), tmp_path)
    plain = runner.run(step(()))
    mixed = runner.run(step((None, "a", None, "b")))
    for index in (0, 2):
        assert torch.equal(rows_of(mixed, index), rows_of(plain, index))
    for index in (1, 3):
        assert not torch.allclose(rows_of(mixed, index), rows_of(plain, index))
    assert torch.equal(runner.run(step(())), plain)  # nothing is left behind


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_with_an_adapter_do_not_see_who_is_beside_them(
    variant: str, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    runner, _ = opened(base_of(variant), tmp_path)
    of_a = runner.run(step(("a",) * 4))
    of_b = runner.run(step(("b",) * 4))
    mixed = runner.run(step(("a", "b", "b", "a")))
    for index, whole in ((0, of_a), (1, of_b), (2, of_b), (3, of_a)):
        assert torch.equal(rows_of(mixed, index), rows_of(whole, index))
    assert not torch.allclose(of_a, of_b)


def test_a_merged_layer_gets_each_part_where_it_belongs(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The fused decoder stacks q, k and v, gate and up; the modules keep them apart."""
    base = base_of("qwen3")
    for ends in (("q_proj",), ("k_proj",), ("v_proj", "up_proj"), ("gate_proj",)):
        directory = tmp_path / "-".join(ends)
        save_tiny_adapter(base, directory / "a", ends=ends, seed=5)
        found = []
        for fused in (True, False):
            runner, _ = opened(base, directory, weights="float32", fused=fused)
            found.append(runner.run(step(("a", None, "a", None))))
            change = found[-1] - runner.run(step(()))
            assert float(rows_of(change, 0).abs().max()) > 0.1
            assert float(rows_of(change, 1).abs().max()) < 1e-4
        assert torch.allclose(*found, atol=1e-3)


@pytest.mark.parametrize("kv", ["int8", "float32"])
def test_scales_of_calibration_reach_the_adapter(
    kv: str, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Weights that carry folded scales give what those without them give."""
    base = base_of("llama")
    found = []
    for calibration in ("auto", None):
        runner, _ = opened(base, tmp_path, kv=kv, calibration=calibration)
        change = runner.run(step(("a",) * 4)) - runner.run(step(()))
        found.append(change.flatten())
    folded, plain = found
    assert float(torch.cosine_similarity(folded, plain, dim=0)) > 0.99
    assert float(folded.norm() / plain.norm()) == pytest.approx(1, abs=0.03)


def test_the_kernels_and_torch_compute_the_same_delta() -> None:
    torch.manual_seed(0)
    a, b, x = torch.randn(6, 130), torch.randn(77, 6), torch.randn(40, 130)
    b[10:20] = 0  # as between the parts of a merged layer
    exact = (x.double() @ a.double().T) @ b.double().T
    spread = float(exact.std())
    by_kernel = KernelDelta(a, b)
    by_torch = TorchDelta(a, b, host_target("float32"))
    assert float((by_kernel(x) - exact).abs().max()) < 1e-3 * spread
    assert float((by_torch(x) - exact).abs().max()) < 1e-5 * spread
    assert bool((by_kernel(x)[:, 10:20] == 0).all())
    assert by_torch.nbytes == 4 * (a.numel() + b.numel())


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 130])
def test_a_row_of_a_delta_is_computed_alone(rows: int) -> None:
    torch.manual_seed(1)
    a, b, x = torch.randn(8, 96), torch.randn(50, 8), torch.randn(130, 96)
    # As on a GPU, which has tiles of rows: handed-in operations mark one.
    device = Target(torch.device("cpu"), object(), torch.bfloat16)  # type: ignore[arg-type]
    for delta, values in (
        (KernelDelta(a, b), x),
        (TorchDelta(a, b, device), x.bfloat16()),
    ):
        whole = delta(values)
        assert torch.equal(delta(values[:rows]), whole[:rows])
        assert torch.equal(delta(values[-rows:]), whole[-rows:])


def test_a_step_with_adapters_is_launched_though_there_are_graphs(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    class Graphs:
        asked = 0

        def run(self, _batch: StepBatch) -> None:
            self.asked += 1

    runner, _ = opened(base_of("llama"), tmp_path)
    runner.graphs = Graphs()  # type: ignore[assignment]
    runner.run(step(("a",) * 4))
    assert runner.graphs.asked == 0
    runner.run(step(()))
    assert runner.graphs.asked == 1


def test_a_step_that_raises_leaves_no_hook(
    base_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = opened(base_of("llama"), tmp_path)
    plain = runner.run(step(()))
    with monkeypatch.context() as broken:
        broken.setattr(ops, "silu_multiply", lambda _x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.run(step(("a",) * 4))
    assert not any(module._forward_hooks for module in runner.model.modules())
    assert torch.equal(runner.run(step(())), plain)


def test_weights_that_overflow_once_they_are_scaled_are_refused(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_of("llama")
    path = save_tiny_adapter(base, tmp_path / "loud", alpha=1e40)
    for options in ({}, {"weights": "float32"}):
        _, cache = opened(base, tmp_path, **options)
        with pytest.raises(ModelLoadError, match=r"loud: .*_proj.* not finite in"):
            cache.check(path)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_an_adapter_that_overflows_leaves_its_neighbours_their_bits(
    variant: str, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """In its step, and in the steps that take its blocks over."""
    runner, cache = opened(base_of(variant), tmp_path)
    plain = runner.run(step(()))
    path = save_tiny_adapter(base_of(variant), tmp_path / "huge", size=1e18, alpha=4)
    with cache.load("huge", path, adapter_digest(path)):
        mixed = runner.run(step((None, "huge", "huge", None)))
    assert not bool(rows_of(mixed, 2).isfinite().all())
    for index in (0, 3):
        assert torch.equal(rows_of(mixed, index), rows_of(plain, index))
    assert torch.equal(runner.run(step(())), plain)


def test_what_cannot_be_run_says_so(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    runner, _ = opened(base_of("llama"), tmp_path)
    with pytest.raises(EngineError, match="4 slices names 1 adapters"):
        runner.run(step(("a",)))
    with pytest.raises(EngineError, match="z is not loaded"):
        runner.run(step(("z",) * 4))
    bare = load_runner(base_of("llama"), num_blocks=16, threads=1)
    with pytest.raises(EngineError, match="serves none"):
        bare.run(step(("a",) * 4))


def test_an_adapter_of_another_family_is_refused(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = save_tiny_adapter(base_of("gpt2"), tmp_path / "other")
    runner, cache = opened(base_of("llama"), tmp_path)
    for attempt in (cache.check, lambda path: cache.load("c", path, "")):
        with pytest.raises(ModelLoadError, match="c_attn"):
            attempt(other)
    assert cache.check(tmp_path / "a").rank == 3
    assert cache.names() == ("a", "b")
    assert runner.run(step(())).isfinite().all()
