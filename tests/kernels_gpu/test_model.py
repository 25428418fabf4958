"""A whole model on a device's operations gives what the CPU's kernels give."""

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, SMALL
from support.tiny_models import save_tiny_model

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.kernels.triton.ops import TritonOps
from tokenmill.workers.engine.model.device import Target
from tokenmill.workers.engine.model.gpu.graph_start import decode_graphs
from tokenmill.workers.engine.model.gpu.warm_up import warm_up
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest


def target(dtype=torch.float32):
    device = torch.device(DEVICE)
    return Target(device, TritonOps(device, tiling=SMALL), dtype)


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


def load(path, device, **settings):
    return load_runner(path, num_blocks=8, threads=1, device=device, **settings)


def logits(runner, steps=STEPS):
    return [runner.run(step).cpu() for step in steps]


def assert_close(actual, expected, tolerance):
    for one, wanted in zip(actual, expected, strict=True):
        assert one.dtype == torch.float32
        assert float(wanted.std()) > 1
        torch.testing.assert_close(one, wanted, rtol=0, atol=tolerance)


def test_int8_weights_through_the_fused_decoder(tmp_path):
    path = save_tiny_model("llama", tmp_path)
    runner = load(path, target())
    # A difference in the last bit of attention can move a quantized value by a step.
    assert_close(logits(runner, STEPS[:2]), logits(load(path, "cpu"), STEPS[:2]), 0.02)
    assert runner.gemm_rows == sum(len(step.token_ids) for step in STEPS[:2])
    assert runner.num_blocks == 8


@pytest.mark.parametrize(
    ("variant", "kv"),
    [("gpt2", "int4"), ("falcon-alibi", "int8"), ("llama-dynamic-far", "float32")],
)
def test_the_models_own_modules(variant, kv, tmp_path):
    path = save_tiny_model(variant, tmp_path)
    settings = {"weights": "float32", "kv": kv, "fused": False}
    expected = logits(load(path, "cpu", **settings))
    # INT4 has few levels: a last bit can move a value by a 16th of its range.
    tolerance = 0.5 if kv == "int4" else 0.02
    assert_close(logits(load(path, target(), **settings)), expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype, tmp_path):
    path = save_tiny_model("llama", tmp_path)
    name = str(dtype).removeprefix("torch.")
    # A float store: what INT8 keys cost is another test's business.
    runner = load(path, target(dtype), weights=name, kv="float32")
    expected = logits(load(path, "cpu", weights="float32", kv="float32"))
    for actual, wanted in zip(logits(runner), expected, strict=True):
        error = float((actual - wanted).abs().mean() / wanted.std())
        assert error < (0.1 if dtype == torch.bfloat16 else 0.02)
    assert {p.dtype for p in runner.model.parameters()} == {dtype}


@pytest.mark.parametrize("weights", ["int8-a8", "int8-bnb", "nf4"])
def test_coarser_weights_stay_near(weights, tmp_path):
    path = save_tiny_model("llama", tmp_path)
    [expected] = logits(load(path, "cpu", weights="float32"), STEPS[:1])
    [actual] = logits(load(path, target(), weights=weights), STEPS[:1])
    error = float((actual - expected).abs().mean() / expected.std())
    assert 0 < error < (1.0 if weights == "nf4" else 0.2)


def test_layers_in_host_memory_give_the_same_logits(tmp_path):
    path = save_tiny_model("llama", tmp_path)
    step = [packed((range(20, 24), 0, (5,)))]
    found = [
        logits(load(path, target(), fused=False, offload_layers=count), step)
        for count in (0, 1)
    ]
    assert_close(*found, 1e-4)


def test_warming_up_counts_no_rows_and_changes_no_logits(tmp_path):
    path = save_tiny_model("llama", tmp_path)
    cold, warm = (load(path, target()) for _ in range(2))
    warm_up(warm, step_tokens=12, max_running=2)
    assert warm.gemm_rows == 0
    for actual, wanted in zip(
        *(logits(r, STEPS[:2]) for r in (warm, cold)), strict=True
    ):
        assert torch.equal(actual, wanted)
    assert warm.gemm_rows == cold.gemm_rows


class EveryStep:
    """Records nothing: a replay runs the padded step again."""

    def record(self, step):
        return step


def generate(runner, path):
    """Greedy tokens of two requests that come and go, as the engine gives them."""
    engine = Engine(
        runner, TokenTable.from_directory(path), max_running=3, prefill_chunk=8
    )
    for index, count in enumerate((2, 4)):
        engine.add(
            EngineRequest(
                id=str(index),
                token_ids=tuple(range(20 + index, 29 + 2 * index)),
                sampling=Sampling(max_tokens=count, temperature=0.0, ignore_eos=True),
                seed=index,
            )
        )
    outputs = {}
    while engine.has_work:
        for finished in engine.step().finished:
            assert finished.error is None
            outputs[finished.request_id] = finished.choices[0].token_ids
    engine.check_integrity()
    return outputs


def test_the_engine_with_padded_decode_steps_gives_the_cpus_tokens(tmp_path):
    path = save_tiny_model("llama", tmp_path)
    settings = {"weights": "float32", "kv": "int8"}
    expected = generate(load(path, "cpu", **settings), path)
    runner = load(path, target(), **settings)
    with torch.inference_mode():
        graphs, buckets = decode_graphs(runner, 3, EveryStep())
        buckets.rows = (3,)
        graphs.capture(buckets.all())
    runner.graphs = graphs
    assert generate(runner, path) == expected
    assert graphs.padded_rows >= 2


def test_a_step_padded_from_two_rows_to_three(tmp_path):
    path = save_tiny_model("llama", tmp_path)
    runner = load(path, target(), weights="float32")
    expected = logits(runner)[-1]
    with torch.inference_mode():
        runner.graphs, buckets = decode_graphs(runner, 3, EveryStep())
        buckets.rows = (3,)
        runner.graphs.capture(buckets.all())
    actual = logits(runner, STEPS[2:])[-1]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert runner.graphs.padded_rows == 1
    for layer in runner._state.layers:  # padding wrote where no sequence reads
        assert layer.k.shape[0] == runner.num_blocks + 1
        assert bool(layer.k[runner.num_blocks, :, 0].any())
