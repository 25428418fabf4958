"""A whole model whose operations are the GPU's gives what the CPU's kernels give."""

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, SMALL
from support.tiny_models import save_tiny_model

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.kernels.triton.ops import TritonOps
from tokenmill.workers.engine.model import attention, quantize
from tokenmill.workers.engine.model.load import load_runner


def packed(*sequences):
    """A step of (token ids, first position, blocks), one logit row a sequence."""
    ids, positions, slices, rows = [], [], [], []
    for tokens, first, blocks in sequences:
        context = first + len(tokens)
        slices.append(SequenceSlice(len(ids), len(tokens), context, blocks))
        positions.extend(range(first, context))
        ids.extend(tokens)
        rows.append(len(ids) - 1)
    return StepBatch(
        np.array(ids, np.int64),
        np.array(positions, np.int64),
        tuple(slices),
        np.array(rows, np.int64),
    )


STEPS = [
    packed((range(20, 31), 0, (5, 2))),
    packed(([7], 11, (5, 2)), (range(60, 69), 0, (1, 4))),
    packed(([9], 12, (5, 2)), ([65], 9, (1, 4))),
]
"""A prefill, a mixed step, two decodes."""


def logits(path):
    runner = load_runner(
        path, block_size=8, num_blocks=8, threads=1, device="cpu", fused=False
    )
    return [runner.run(step) for step in STEPS]


@pytest.mark.skipif(DEVICE != "cpu", reason="the model runner computes on the CPU")
def test_logits_are_those_of_the_cpu_kernels(tmp_path, monkeypatch):
    path = save_tiny_model("llama", tmp_path)
    expected = logits(path)
    ops = TritonOps("cpu", tiling=SMALL)
    monkeypatch.setattr(attention, "ops", ops)
    monkeypatch.setattr(quantize, "ops", ops)
    # A difference in the last bit of attention can move a quantized value by a step.
    for actual, wanted in zip(logits(path), expected, strict=True):
        assert float(wanted.std()) > 1
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0.02)
