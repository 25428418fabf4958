"""What goes into a step."""

import pytest
from support.engine_driver import request

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.kv.manager import Allocation
from tokenmill.workers.engine.planner import halve, num_tokens, pack, plan_step
from tokenmill.workers.engine.sequence import Sequence


def sequence(prompt: int, *, computed: int = 0, first_block: int = 0) -> Sequence:
    made = Sequence(
        request(f"r{first_block}", range(prompt)),
        0,
        max_output=8,
        eos_ids=frozenset(),
        source=TokenTable.for_bytes(),
        arrival=1,
    )
    made.num_computed = computed
    made.allocation = Allocation(4)
    made.allocation.blocks = list(range(first_block, first_block + 20))
    return made


def shape(plan):
    return [(part.start, part.length, part.samples) for part in plan]


def test_decode_rows_come_first_and_prefill_fills_the_rest():
    running = [sequence(30), sequence(5, computed=4), sequence(9), sequence(3)]
    plan = plan_step(running, 32)
    assert shape(plan) == [(4, 1, True), (0, 30, True), (0, 1, False)]
    assert num_tokens(plan) == 32


def test_a_long_prompt_runs_in_chunks_and_samples_at_its_end_alone():
    one = sequence(20)
    shapes = []
    while one.num_computed < 20:
        [part] = plan_step([one], 8)
        shapes.append((part.start, part.length, part.samples))
        one.num_computed = part.end
    assert shapes == [(0, 8, False), (8, 8, False), (16, 4, True)]


def test_decode_rows_beyond_the_budget_all_run_and_prefill_still_moves():
    running = [sequence(5, computed=4) for _ in range(4)] + [sequence(10)]
    assert shape(plan_step(running, 2)) == [(4, 1, True)] * 4 + [(0, 1, False)]


def test_a_prompt_of_one_token_is_a_decode_row():
    assert shape(plan_step([sequence(1)], 8)) == [(0, 1, True)]


def test_packing_lays_out_tokens_positions_and_tables():
    running = [sequence(6, computed=5), sequence(9, first_block=40)]
    running[1].num_computed = 3
    batch = pack(plan_step(running, 8))
    assert batch.token_ids.tolist() == [5, 3, 4, 5, 6, 7, 8]
    assert batch.positions.tolist() == [5, 3, 4, 5, 6, 7, 8]
    assert batch.logit_rows.tolist() == [0, 6]
    first, second = batch.slices
    assert (first.query_start, first.query_length, first.context_length) == (0, 1, 6)
    assert (second.query_start, second.query_length, second.context_length) == (1, 6, 9)
    assert first.block_table == (0, 1)
    assert second.block_table == (40, 41, 42)


def test_a_plan_is_halved_by_slices_and_then_by_tokens():
    plan = plan_step([sequence(5, computed=4), sequence(7), sequence(8)], 64)
    assert shape(halve(plan)) == [(4, 1, True)]
    assert shape(halve((plan[1],))) == [(0, 3, False)]


def test_nothing_runs_without_blocks():
    one = sequence(3)
    one.allocation = None
    with pytest.raises(EngineError, match="without KV blocks"):
        pack(plan_step([one], 8))
