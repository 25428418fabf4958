"""The benchmark of split models: what it expects, and the steps that it runs."""

import numpy as np
import pytest
from support.bench_modules import bench_module

tp = bench_module("tp")
CONFIG = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 100}


def test_the_expected_exchanges_follow_from_the_shape():
    # Two sums a layer and the embedding's; to each of the others goes a whole tensor.
    small = tp.expected(CONFIG, 4, 2)
    assert small["all_reduce_calls"] == 7
    assert small["all_reduce_bytes"] == 7 * 3 * 2 * 64 * 4
    assert small["gather_calls"] == 1
    # Of a large one a quarter, there and back.
    large = tp.expected(CONFIG, 4, 4096)
    assert large["all_reduce_bytes"] == 7 * 2 * 3 * (4096 * 64 // 4) * 4


def test_what_is_not_as_expected_is_a_problem():
    figures = {
        "all_reduce_calls": 8.0,
        "decode_ms": 3.0,
        "prefill_ms": 3.0,
        "tokens": [1, 2, 3, 4],
    }
    base = {"decode_ms": 2.0, "prefill_ms": 6.0, "tokens": [1, 2, 3, 5]}
    problems = tp.compare(figures, base, {"all_reduce_calls": 7})
    assert problems == ["all_reduce_calls is 8, expected 7"]
    assert figures["decode_ms_ratio"] == pytest.approx(1.5)
    assert figures["prefill_ms_ratio"] == pytest.approx(0.5)
    assert figures["tokens_equal_percent"] == pytest.approx(75)


def test_sequences_have_blocks_of_their_own():
    steps = tp.Steps(3, 16, 8, 100)
    filled = list(steps.fill())
    decode = steps.decode(np.zeros(3, dtype=np.int64), 5)
    tables = [part.block_table for part in decode.slices]
    assert len({block for table in tables for block in table}) == sum(map(len, tables))
    assert [batch.slices[0].block_table for batch in filled] == tables
    assert all(part.context_length == 16 + 5 + 1 for part in decode.slices)
    assert decode.positions.tolist() == [21, 21, 21]
