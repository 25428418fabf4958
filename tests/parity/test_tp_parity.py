"""A model over several ranks gives what it gives on one: every family, every degree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.generate_reference import prompts
from support.invariance import Scarce, drain, others, small, wanted
from support.ranks import Ranks
from support.step_driver import Sequence, StepDriver, check_same
from support.tiny_models import VARIANTS
from support.wide_models import WIDE, save_wide_model

from tokenmill.workers.engine.batch import ModelRunner
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.families import FAMILIES
from tokenmill.workers.engine.model.load import load_runner

LENGTHS = (3, 61, 1, 18)
OUTPUT = 8
"""Tokens of each sequence: every step is tens of exchanges between threads."""
EIGHTFOLD = ("llama", "mistral", "qwen2", "qwen3", "glm4", "gpt2", "falcon-grouped")
"""One of each family, which is split over eight ranks as well."""
EXACT = {"weights": "float32", "kv": "float32", "num_blocks": 96}
TOLERANCE = 1e-4
INT8_TOLERANCE = 0.03
"""Of the spread of a row's logits: weights are rounded by other scales in each part."""


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Groups by their size, each connected at its first use."""
    groups: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in groups:
            place = tmp_path_factory.mktemp("ranks") / "rendezvous"
            groups[size] = Ranks(size, place)
        return groups[size]

    yield get
    for group in groups.values():
        group.__exit__()


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a checkpoint at its first use and returns its directory."""
    root = tmp_path_factory.mktemp("wide")
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = save_wide_model(variant, root)
        return made[variant]

    return get


def run(runner: ModelRunner, chunk: int = 24) -> list[Sequence]:
    sequences = [Sequence(prompt, OUTPUT) for prompt in prompts(LENGTHS)]
    StepDriver(runner, chunk=chunk).run(sequences)
    return sequences


@pytest.mark.parametrize("variant", sorted(WIDE))
def test_every_degree_gives_the_same_tokens(
    variant: str, ranks_of: Callable[[int], Ranks], wide_model: Callable[[str], Path]
) -> None:
    path = wide_model(variant)
    expected = run(load_runner(path, threads=1, device="cpu", **EXACT))
    for size in (2, 4, 8) if variant in EIGHTFOLD else (2, 4):
        with ranks_of(size).serving(path, **EXACT) as runner:
            found = run(runner, chunk=64 if size == 8 else 24)
        check_same(found, expected, TOLERANCE)
    if FAMILIES[VARIANTS[variant][0]].llama_pattern:
        with ranks_of(2).serving(path, fused=False, **EXACT) as runner:
            check_same(run(runner), expected, TOLERANCE)


def test_every_family_is_split_as_far_as_it_goes() -> None:
    assert {VARIANTS[variant][0] for variant in EIGHTFOLD} == set(FAMILIES)


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3", "gpt2", "falcon-grouped"])
def test_int8_parts_are_as_good_as_the_whole(
    variant: str, ranks_of: Callable[[int], Ranks], wide_model: Callable[[str], Path]
) -> None:
    """Teacher-forced: each step's logits against those of one rank, same inputs."""
    path = wide_model(variant)
    options = {"weights": "int8", "kv": "int8", "num_blocks": 96}
    exact = one_step(load_runner(path, threads=1, device="cpu", **EXACT))
    whole = one_step(load_runner(path, threads=1, device="cpu", **options))
    for size in (2, 4):
        with ranks_of(size).serving(path, **options) as runner:
            split = one_step(runner)
            assert runner.weights_version.endswith(f"+tp{size}")
        assert error_of(split, exact) <= max(1.3 * error_of(whole, exact), 0.005)
        assert error_of(split, whole) <= INT8_TOLERANCE


@pytest.mark.parametrize(("weights", "kv"), [("nf4", "int8"), ("int8", "int4")])
def test_other_precisions_run_split(
    weights: str,
    kv: str,
    ranks_of: Callable[[int], Ranks],
    wide_model: Callable[[str], Path],
) -> None:
    path = wide_model("llama")
    options = {"weights": weights, "kv": kv, "num_blocks": 96}
    exact = one_step(load_runner(path, threads=1, device="cpu", **EXACT))
    whole = one_step(load_runner(path, threads=1, device="cpu", **options))
    with ranks_of(2).serving(path, **options) as runner:
        split = one_step(runner)
    assert error_of(split, exact) <= 1.5 * error_of(whole, exact)


def one_step(runner: ModelRunner) -> torch.Tensor:
    """Logits of all prompts' last tokens, and of one more step with a fixed token."""
    sequences = [Sequence(prompt, 2) for prompt in prompts(LENGTHS)]
    driver = StepDriver(runner, chunk=512)
    driver.step(sequences)
    for sequence in sequences:
        sequence.output[0] = 65
    driver.step(sequences)
    return torch.stack([row for one in sequences for row in one.logits])


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square difference, as a part of the spread of the expected logits."""
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("variant", ["llama", "gpt2", "falcon-alibi-multi-query"])
def test_two_sums_a_layer_and_one_exchange_at_each_end(
    variant: str, ranks_of: Callable[[int], Ranks], wide_model: Callable[[str], Path]
) -> None:
    ranks = ranks_of(2)
    calls, sent = (
        [
            {kind: getattr(one, what) for kind, one in end.counts.items()}
            for end in ranks.ends
        ]
        for what in ("calls", "bytes")
    )
    sequence = Sequence(prompts((3,))[0], 1)
    with ranks.serving(wide_model(variant), **EXACT) as runner:
        StepDriver(runner, chunk=512).run([sequence])
    layers, embedding = 2, 1
    for rank, end in enumerate(ranks.ends):
        made = {kind: one.calls - calls[rank][kind] for kind, one in end.counts.items()}
        assert made == {
            "all_reduce": 2 * layers + embedding,
            "gather": 1,
            "broadcast": 2,  # the step's plan, and the end
            # At load: what is free, the size of the KV pool, and which weights.
            "numbers": 3,
        }
        hidden, tokens, row = 64, 3, 4
        sums = end.counts["all_reduce"].bytes - sent[rank]["all_reduce"]
        assert sums == (2 * layers + embedding) * tokens * hidden * row
        logits = end.counts["gather"].bytes - sent[rank]["gather"]
        assert logits == rank * 131 * row  # of 259; only the last token's


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_do_not_depend_on_the_batch_within_a_degree(
    size: int, ranks_of: Callable[[int], Ranks], wide_model: Callable[[str], Path]
) -> None:
    """Alone, among others and in chunks: the same bits, so that sums keep their order.

    Widths are such that some sums are large enough to take the way of two rounds.
    """
    path = wide_model("llama")
    options = {"weights": "int8", "kv": "int8", "num_blocks": 200}
    with ranks_of(size).serving(path, **options) as runner:
        alone = []
        for prompt in prompts((3, 61, 1, 18, 90, 90, 90, 90)):
            sequences = [Sequence(prompt, 4)]
            StepDriver(runner, chunk=512).run(sequences)
            alone += sequences
        for chunk in (512, 7):
            together = [
                Sequence(prompt, 4)
                for prompt in prompts((3, 61, 1, 18, 90, 90, 90, 90))
            ]
            StepDriver(runner, chunk=chunk, seed=chunk).run(together)
            for mine, other in zip(alone, together, strict=True):
                assert mine.output == other.output
                for first, second in zip(mine.logits, other.logits, strict=True):
                    assert torch.equal(first, second)


def test_preemption_and_cancellation_leave_the_ranks_in_step(
    ranks_of: Callable[[int], Ranks], wide_model: Callable[[str], Path]
) -> None:
    """An engine over a group, whose requests come, yield, go and come again."""
    path, request = wide_model("llama"), wanted(2, 0.8)
    table = TokenTable.from_directory(path)
    options = {"weights": "int8", "kv": "int8", "num_blocks": 64}
    with ranks_of(2).serving(path, **options) as runner:
        alone = Engine(runner, table)
        alone.add(request)
        expected = drain(alone)["wanted"]
        scarce = Scarce(runner, 16)
        # Chunks that follow the clock would make the ten steps differ.
        options = {"kv_overcommit": 16.0, "prefill_chunk": 7, "step_target_ms": 0.0}
        pressed = Engine(scarce, table, **options)
        for one in (*small(request), request, *others(request)[:2]):
            pressed.add(one)
        for _ in range(10):
            pressed.step()
        assert pressed.cancel("other0")
        assert drain(pressed)["wanted"] == expected
        assert pressed.capacity().preemptions > 0
