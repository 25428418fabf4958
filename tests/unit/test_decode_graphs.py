"""Decode steps in buckets: sizes, padding, what is replayed, what is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import save_tiny_model

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.kernels.layout import StepLayout
from tokenmill.workers.engine.model.gpu.cuda_graphs import capture_and_measure
from tokenmill.workers.engine.model.gpu.graphs import (
    Bucket,
    Buckets,
    DecodeGraphs,
    DecodeInputs,
    context_buckets,
    row_buckets,
)
from tokenmill.workers.engine.model.load import load_runner

CPU = torch.device("cpu")
BLOCK, SCRATCH = 8, 9


def decodes(*sequences: tuple[int, int, tuple[int, ...]]) -> StepBatch:
    """A decode step of (token, context, blocks)."""
    return StepBatch(
        np.array([token for token, _, _ in sequences], np.int64),
        np.array([context - 1 for _, context, _ in sequences], np.int64),
        tuple(
            SequenceSlice(row, 1, context, blocks)
            for row, (_, context, blocks) in enumerate(sequences)
        ),
        np.arange(len(sequences)),
    )


class FakeRecorder:
    """Records the step itself and counts."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        step()
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            return step()

        return replay


def inputs(buckets: Buckets) -> DecodeInputs:
    return DecodeInputs(buckets, BLOCK, SCRATCH, CPU, lambda layout, _context: layout)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (17, (1, 2, 4, 8, 16, 17))],
)
def test_rows_double_up_to_the_most(most: int, expected: tuple[int, ...]) -> None:
    assert row_buckets(most) == expected


def test_contexts_grow_fourfold_up_to_the_models_own() -> None:
    assert context_buckets(700) == (700,)
    assert context_buckets(40_000) == (4096, 16_384, 40_000)


def test_the_smallest_bucket_that_holds_a_step_is_chosen() -> None:
    buckets = Buckets(8, 6000)
    assert buckets.choose(decodes((1, 9, (0, 1)))) == Bucket(1, 4096)
    three = [(1, 9, (0, 1))] * 3
    assert buckets.choose(decodes(*three)) == Bucket(4, 4096)
    assert buckets.choose(decodes(*three, (1, 4097, (0,)))) == Bucket(4, 6000)
    assert buckets.choose(decodes(*[(1, 9, (0, 1))] * 9)) is None
    assert buckets.choose(decodes((1, 6001, (0,)))) is None


def test_steps_that_are_not_decodes_have_no_bucket() -> None:
    buckets = Buckets(8, 100)
    prompt = StepBatch(
        np.arange(2), np.arange(2), (SequenceSlice(0, 2, 2, (0,)),), np.array([1])
    )
    chunk = StepBatch(
        np.arange(1), np.arange(1), (SequenceSlice(0, 1, 1, (0,)),), np.array([], int)
    )
    assert buckets.choose(prompt) is None
    assert buckets.choose(chunk) is None


def test_a_filled_bucket_is_the_step_with_padding_in_the_scratch_block() -> None:
    buckets = Buckets(4, 64)
    filled = inputs(buckets)
    bucket = Bucket(4, 64)
    filled.fill(decodes(*[(9, 64, (1, 2, 3, 4, 5, 6, 7, 8))] * 4), bucket)
    batch = decodes((5, 17, (4, 2, 7)), (6, 8, (3,)))
    filled.fill(batch, bucket)
    token_ids, layout = filled.view(bucket)
    expected = StepLayout.from_batch(batch, BLOCK)
    assert token_ids.tolist() == [5, 6, 0, 0]
    assert layout.positions.tolist() == [16, 7, 0, 0]
    assert layout.slot_mapping[:2].tolist() == expected.slot_mapping.tolist()
    assert layout.slot_mapping[2:].tolist() == [SCRATCH * BLOCK] * 2
    assert layout.context_length.tolist() == [17, 8, 1, 1]
    assert layout.query_start.tolist() == [0, 1, 2, 3, 4]
    assert layout.block_table[0, :3].tolist() == [4, 2, 7]
    assert layout.block_table[1, :1].tolist() == [3]
    assert layout.block_table[2:, 0].tolist() == [SCRATCH] * 2


def test_padding_attends_over_a_context_to_measure_with_and_forgets_it() -> None:
    filled = inputs(Buckets(2, 64))
    bucket = Bucket(2, 64)
    filled.fill(None, bucket, padding_context=20)
    _, layout = filled.view(bucket)
    assert layout.context_length.tolist() == [20, 20]
    assert layout.positions.tolist() == [19, 19]
    assert layout.block_table[:, :3].tolist() == [[SCRATCH] * 3] * 2
    assert layout.slot_mapping.tolist() == [SCRATCH * BLOCK] * 2
    filled.fill(None, bucket)
    assert layout.context_length.tolist() == [1, 1]
    assert layout.positions.tolist() == [0, 0]


def test_gains_are_measured_at_half_of_a_buckets_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    contexts: list[list[int]] = []

    def forward(token_ids: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        contexts.append(layout.context_length.tolist())
        return token_ids[:, None].float()

    buckets = Buckets(2, 64)
    graphs = DecodeGraphs(buckets, inputs(buckets), forward, FakeRecorder())
    gains = capture_and_measure(graphs, buckets.all(), CPU)
    assert [(gain.rows, gain.context) for gain in gains] == [(1, 32), (2, 32)]
    assert contexts[:2] == [[1, 1], [1]]  # as recorded
    assert contexts[2:] == [[32]] * 10 + [[32, 32]] * 10


def test_tensors_never_move() -> None:
    buckets = Buckets(4, 64)
    filled = inputs(buckets)
    before, _ = filled.view(Bucket(2, 64))
    address = before.data_ptr()
    filled.fill(decodes((5, 17, (4, 2, 7))), Bucket(2, 64))
    assert before.tolist() == [5, 0]
    assert filled.view(Bucket(4, 64))[0].data_ptr() == address


def test_a_step_is_replayed_in_its_bucket_and_padding_is_dropped() -> None:
    buckets, recorder = Buckets(4, 64), FakeRecorder()

    def forward(token_ids: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        return torch.stack((token_ids, layout.context_length), dim=1).float()

    graphs = DecodeGraphs(buckets, inputs(buckets), forward, recorder)
    graphs.capture()
    assert recorder.recorded == 3
    batch = decodes((5, 17, (4, 2, 7)), (6, 8, (3,)), (7, 2, (1,)))
    logits = graphs.run(batch)
    assert logits is not None
    assert logits.tolist() == [[5, 17], [6, 8], [7, 2]]
    assert (recorder.replayed, graphs.padded_rows) == (1, 1)
    assert graphs.run(decodes((5, 65, tuple(range(9))))) is None
    assert (recorder.replayed, graphs.padded_rows) == (1, 1)


def test_a_bucket_that_was_not_recorded_is_left_to_the_caller() -> None:
    buckets = Buckets(4, 64)
    graphs = DecodeGraphs(
        buckets, inputs(buckets), lambda ids, _: ids[:, None].float(), FakeRecorder()
    )
    graphs.capture([Bucket(1, 64)])
    assert graphs.run(decodes((5, 3, (1,)))) is not None
    assert graphs.run(decodes((5, 3, (1,)), (6, 3, (2,)))) is None


@pytest.mark.parametrize("variant", ["llama", "falcon-alibi"])
def test_padded_steps_give_the_bits_of_unpadded_ones(
    variant: str, tmp_path: Path
) -> None:
    path = save_tiny_model(variant, tmp_path)
    steps = [
        StepBatch(
            np.arange(20, 37),
            np.concatenate((np.arange(11), np.arange(6))),
            (SequenceSlice(0, 11, 11, (5, 2)), SequenceSlice(11, 6, 6, (4,))),
            np.array([10, 16]),
        ),
        decodes((7, 12, (5, 2)), (60, 7, (4,))),
        decodes((8, 13, (5, 2)), (61, 8, (4,))),
        decodes((61, 9, (4, 1))),
    ]
    runners = [
        load_runner(path, num_blocks=SCRATCH + 1, threads=1, device="cpu")
        for _ in range(2)
    ]
    padded = runners[1]
    buckets, recorder = Buckets(3, 64), FakeRecorder()
    buckets.rows = (3,)  # every decode is padded
    padded.graphs = DecodeGraphs(buckets, inputs(buckets), padded.forward, recorder)
    with torch.inference_mode():
        padded.graphs.capture()
    assert padded.gemm_rows == 0
    for step in steps:
        expected, actual = (runner.run(step) for runner in runners)
        assert torch.equal(actual, expected)
        assert padded.gemm_rows == runners[0].gemm_rows
    assert recorder.replayed == 3
    assert padded.graphs.padded_rows == 4
