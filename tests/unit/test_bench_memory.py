"""The memory benchmark's own logic: waste of static batches, bytes by part."""

import pytest
import torch
from support.bench_modules import bench_module
from torch import nn

memory = bench_module("memory")
sides = bench_module("memory_sides")
static_waste = bench_module("memory_waste").static_waste


def test_a_static_batch_reserves_its_longest():
    # Prompts of 4 and 2, outputs of 2 and 1: 2 steps, 6 slots each, so 24 in all;
    # used: 4 + 5 of the first, 2 of the second in the first step.
    assert static_waste([(4, 2), (2, 1)], batch_size=2) == pytest.approx(1 - 11 / 24)


def test_each_batch_has_its_own_longest():
    alone = static_waste([(4, 1)], batch_size=1)
    assert static_waste([(4, 1), (4, 1)], batch_size=1) == pytest.approx(alone)
    assert static_waste([(4, 1)], batch_size=1, context=100) == pytest.approx(0.96)


def test_each_tensor_counts_once_and_by_part():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.Linear(4, 10))
    model[2].weight = model[0].weight  # a tied head has no bytes of its own
    model[2].bias = None
    assert sides.module_bytes(model, model[2]) == {
        "linear": 4 * (4 * 6 + 6),
        "head": 0,
        "other": 4 * 10 * 4,
    }


def test_packed_weights_are_found_in_our_layers():
    from tokenmill.workers.engine.kernels import ops

    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    packed = ops.quantize_weight(torch.ones(32, 64), activations="int16")
    model[0].packed = packed
    found = sides.module_bytes(model, nn.Identity())
    assert found["linear"] == packed.nbytes + 4
    assert packed.nbytes >= 32 * 64


def test_savings_are_against_float16():
    kinds = {
        "float16": {"mib": 100.0},
        "int8": {"mib": 52.5},
        "float32": {"mib": 200.0},
    }
    assert memory.savings(kinds, "mib") == {"int8": 47.5, "float32": -100.0}


def test_missed_targets_are_said_with_their_figures():
    assert memory.Targets(1.9, 46.0, 49.0).missed() == []
    missed = memory.Targets(2.5, 30.0, 44.0).missed()
    assert len(missed) == 3
    assert "2.50" in missed[0]


def test_percentiles_are_values_that_occurred():
    percentile = bench_module("harness").percentile
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(SystemExit):
        percentile([], 0.5)
