"""Steps at start: which, on whose blocks, and what they leave behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.batch import StepBatch
from tokenmill.workers.engine.model.gpu.graph_start import GraphOptions, add_graphs

SCRATCH, BLOCK = 100, 8


class FakeRunner:
    """Notes the steps that nobody asked for."""

    target = SimpleNamespace(device=torch.device("cuda", 0))
    num_blocks, block_size, max_context = SCRATCH, BLOCK, 4096

    def __init__(self, room: int = 10_000) -> None:
        self.steps: list[StepBatch] = []
        self.released = 0
        self.graphs = None
        self._room = room

    def rehearse(self, batch: StepBatch) -> None:
        if len(batch.token_ids) > self._room:
            raise torch.OutOfMemoryError("out of memory")
        self.steps.append(batch)

    def release_caches(self) -> None:
        self.released += 1


def started(runner: FakeRunner, communicator: object = None) -> list[list[int]]:
    """Starts without graphs; returns the tokens of each sequence of each step."""
    made = SimpleNamespace(weights="int8", communicator=communicator)
    checkpoint = SimpleNamespace(options=made)
    options = GraphOptions(max_running=4, step_tokens=260, enabled=False)
    add_graphs(runner, checkpoint, options)  # type: ignore[arg-type]
    return [[piece.query_length for piece in step.slices] for step in runner.steps]


def test_a_gpu_runs_prefills_a_mixed_step_and_decodes_without_graphs_too() -> None:
    runner = FakeRunner()
    lengths = started(runner)
    assert runner.graphs is None
    assert [256] in lengths
    assert [256, 1, 1, 1] in lengths
    assert lengths[-2:] == [[1], [1, 1, 1, 1]]


def test_its_steps_are_whole_and_touch_the_scratch_block_alone() -> None:
    runner = FakeRunner()
    started(runner)
    for step in runner.steps:
        assert len(step.token_ids) == len(step.positions)
        assert len(step.token_ids) == sum(s.query_length for s in step.slices)
        assert {block for s in step.slices for block in s.block_table} == {SCRATCH}
        for piece, row in zip(step.slices, step.logit_rows, strict=True):
            assert len(piece.block_table) * BLOCK >= piece.context_length
            assert row == piece.query_start + piece.query_length - 1
            assert step.positions[row] == piece.context_length - 1


def test_where_memory_runs_out_the_start_goes_on() -> None:
    runner = FakeRunner(room=100)
    assert started(runner) == [[16], [32], [64]]
    assert runner.released == 1


def test_a_rank_of_a_group_cannot_leave_a_step_and_says_what_would_fit() -> None:
    group = SimpleNamespace(numbers=lambda own: (own, own))
    with pytest.raises(ModelLoadError, match=r"256 tokens .*lower worker\.prefill"):
        started(FakeRunner(room=100), group)


def test_any_other_failure_ends_the_start() -> None:
    class Broken(FakeRunner):
        def rehearse(self, batch: StepBatch) -> None:
            raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        started(Broken())
