"""Adapters on a model over several ranks give what they give on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.generate_reference import prompts
from support.ranks import ADAPTERS, Ranks
from support.step_driver import Sequence, StepDriver, check_same
from support.tiny_adapters import save_tiny_adapter
from support.wide_models import save_wide_model

from tokenmill.shared.errors import AdapterUnavailable, ModelLoadError
from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import adapter_digest
from tokenmill.workers.engine.adapters.serving import serve_adapters
from tokenmill.workers.engine.batch import ModelRunner
from tokenmill.workers.engine.model.load import load_runner

EXACT = {"weights": "float32", "kv": "float32", "num_blocks": 96}
TOLERANCE = 2e-4
LENGTHS = (3, 40, 1, 18, 9)
WHO = ("all", "some", None, "all", None)
OUTPUT = 6
SOME = ("v_proj", "gate_proj", "down_proj", "c_attn", "mlp.c_proj", "dense")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks") / "rendezvous") as ranks:
        yield ranks


def adapters(base: Path, directory: Path) -> dict[str, Path]:
    return {
        "all": save_tiny_adapter(base, directory / "all", rank=6, size=0.15),
        "some": save_tiny_adapter(
            base,
            directory / "some",
            ends=SOME,
            rank=3,
            seed=1,
            size=0.15,
            dtype=torch.bfloat16,
        ),
    }


def bring(cache: AdapterCache, paths: dict[str, Path]) -> None:
    for name, path in paths.items():
        cache.load(name, path, adapter_digest(path)).release()


def run(runner: ModelRunner, who=WHO, chunk: int = 24) -> list[Sequence]:
    """All prompts in the same steps, each with its adapter."""
    sequences = [
        Sequence(prompt, OUTPUT, adapter=name)
        for prompt, name in zip(prompts(LENGTHS), who, strict=True)
    ]
    StepDriver(runner, chunk=chunk).run(sequences)
    return sequences


def on_one_rank(base: Path, paths: dict[str, Path], **options: object):
    runner = load_runner(base, threads=1, device="cpu", **options)
    bring(serve_adapters(runner, max_bytes=ADAPTERS), paths)
    return runner


@pytest.mark.parametrize("variant", ["llama", "glm4", "gpt2", "falcon-grouped"])
def test_a_step_of_several_adapters_and_none_is_that_of_one_rank(
    variant: str, pair: Ranks, tmp_path: Path
) -> None:
    base = save_wide_model(variant, tmp_path)
    paths = adapters(base, tmp_path)
    one = on_one_rank(base, paths, **EXACT)
    expected, plain = run(one), run(one, (None,) * len(WHO))
    with pair.serving_adapters(base, **EXACT) as (runner, cache, _):
        before = run(runner, (None,) * len(WHO))
        bring(cache, paths)
        calls = [pair.ends[0].counts["all_reduce"].calls]
        found = run(runner)
        calls.append(pair.ends[0].counts["all_reduce"].calls)
        after = run(runner, (None,) * len(WHO))
        calls.append(pair.ends[0].counts["all_reduce"].calls)
    check_same(found, expected, TOLERANCE)
    assert calls[1] - calls[0] == calls[2] - calls[1], "no exchange is an adapter's own"
    for name, mine, bare, first, last in zip(
        WHO, found, plain, before, after, strict=True
    ):
        change = (mine.logits[0] - bare.logits[0]).abs().max()
        assert (change <= TOLERANCE) == (name is None)
        assert all(map(torch.equal, first.logits, last.logits)), "nothing is left"


def test_heads_kept_by_two_ranks_and_odd_widths(tmp_path: Path) -> None:
    """Four ranks, two KV heads, an MLP that four does not divide."""
    base = save_wide_model(
        "llama", tmp_path, num_key_value_heads=2, intermediate_size=83
    )
    paths = adapters(base, tmp_path)
    expected = run(on_one_rank(base, paths, **EXACT))
    with (
        Ranks(4, tmp_path / "rendezvous") as four,
        four.serving_adapters(base, **EXACT) as (runner, cache, _),
    ):
        bring(cache, paths)
        check_same(run(runner), expected, TOLERANCE)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_int8_parts_do_not_see_who_is_beside_them(
    variant: str, pair: Ranks, tmp_path: Path
) -> None:
    """The bits of a request alone, whatever shares its steps; as good as one rank's."""
    base = save_wide_model(variant, tmp_path)
    paths = adapters(base, tmp_path)
    options = {"weights": "int8", "kv": "int8", "num_blocks": 96}
    exact = first_logits(on_one_rank(base, paths, **EXACT))
    whole = first_logits(on_one_rank(base, paths, **options))
    with pair.serving_adapters(base, **options) as (runner, cache, _):
        bring(cache, paths)
        together = run(runner, chunk=7)
        for index, name in enumerate(WHO):
            alone = Sequence(prompts(LENGTHS)[index], OUTPUT, adapter=name)
            StepDriver(runner, chunk=512, seed=index).run([alone])
            assert all(map(torch.equal, alone.logits, together[index].logits))
        split = first_logits(runner)
    assert error_of(split, exact) <= max(1.3 * error_of(whole, exact), 0.01)


def first_logits(runner: ModelRunner) -> torch.Tensor:
    sequences = [
        Sequence(prompt, 1, adapter=name)
        for prompt, name in zip(prompts(LENGTHS), WHO, strict=True)
    ]
    StepDriver(runner, chunk=512).run(sequences)
    return torch.stack([one.logits[0] for one in sequences])


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square difference, as a part of the spread of the expected logits."""
    return float((found - expected).square().mean().sqrt() / expected.std())


def test_ranks_hold_their_parts_of_what_rank_0_keeps(
    pair: Ranks, tmp_path: Path
) -> None:
    base = save_wide_model("llama", tmp_path)
    paths = adapters(base, tmp_path)
    with pair.serving_adapters(base, **EXACT) as (_, cache, _):
        bring(cache, {"all": paths["all"]})
        part = cache.stats().bytes
    one = serve_adapters(
        load_runner(base, threads=1, device="cpu", **EXACT), max_bytes=ADAPTERS
    )
    bring(one, {"all": paths["all"]})
    assert part < 0.75 * one.stats().bytes
    with pair.serving_adapters(base, part, **EXACT) as (runner, cache, followers):
        (other,) = followers.adapters
        bring(cache, {"all": paths["all"]})
        assert other.tickets() == {"1"}
        lease = cache.lease("all")
        with pytest.raises(AdapterUnavailable, match="in use by running requests"):
            bring(cache, {"some": paths["some"]})
        assert other.tickets() == {"1"}, "what found no room is kept nowhere"
        lease.release()
        bring(cache, {"some": paths["some"]})
        assert cache.names() == ("some",)
        assert other.tickets() == {"3"}
        run(runner, ("some", None, "some", None, None))
        assert cache.check(paths["all"]).rank == 6
        assert other.tickets() == {"3"}, "a check keeps nothing"


def test_values_that_another_rank_has_are_checked_there(
    pair: Ranks, tmp_path: Path
) -> None:
    """Rank 0 never sees the last rows of B; a NaN there is found all the same."""
    from safetensors.torch import load_file, save_file

    base = save_wide_model("llama", tmp_path)
    path = save_tiny_adapter(base, tmp_path / "bad", ends=("q_proj",))
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(one for one in tensors if "lora_B" in one)
    tensors[name][-1, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    good = save_tiny_adapter(base, tmp_path / "good", seed=3)
    with pair.serving_adapters(base, **EXACT) as (runner, cache, followers):
        refused = rf"rank 1 cannot load it: .*{name}"
        with pytest.raises(ModelLoadError, match=refused):
            cache.load("bad", path, adapter_digest(path))
        with pytest.raises(ModelLoadError, match=refused):
            cache.check(path)
        assert followers.adapters[0].tickets() == frozenset()
        bring(cache, {"all": good})
        run(runner, ("all", None, None, None, None))
