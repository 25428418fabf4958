"""Bulk takes nothing from interactive requests, and yet goes on wherever it can."""

import msgspec
import pytest
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import FakeRunner

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.bulk_share import BulkShare
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.planner import plan_step
from tokenmill.workers.engine.sequence import PATIENCE

TABLE = TokenTable.for_bytes()


def make(blocks: int = 400, **options) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks=blocks, block_size=4)
    options.setdefault("step_target_ms", 0.0)
    return Engine(runner, TABLE, **options), runner


def long(name: str, prompt, max_tokens: int):
    return request(name, prompt, max_tokens=max_tokens, ignore_eos=True)


def bulk(name: str, prompt, max_tokens: int):
    wanted = long(name, prompt, max_tokens)
    return msgspec.structs.replace(wanted, job_class=JobClass.BULK)


def running(engine: Engine) -> list[str]:
    return [one.request.id for one in engine._roster.running]


def test_bulk_that_was_overtaken_often_holds_up_no_interactive_request():
    """One long stream leaves no room for the bulk that was pushed out, but for small
    interactive requests; however many of them pass it, the next starts at once.
    """
    engine, _ = make(blocks=42, max_running=8)
    stream = Stream()
    engine.add(bulk("b", range(90), 38))
    for _ in range(18):
        stream.take(engine.step())  # it holds 27 blocks
    engine.add(long("a", range(30, 90), 60))  # 15 blocks, later 30
    for index in range(3 * PATIENCE):
        name = f"i{index}"
        engine.add(long(name, [index, 3], 2))  # one block
        stream.take(engine.step())
        assert stream.token_ids[name, 0], f"{name} waits"
        assert "b" not in running(engine)
        stream.take(engine.step())
    drain(engine, stream)
    assert stream.token_ids["b", 0] == greedy_oracle(range(90), 38, eos=None)


def test_an_interactive_stream_stands_still_for_no_bulk():
    """More is promised than there are blocks: bulk yields, however often it did."""
    engine, _ = make(blocks=30, max_running=8, kv_overcommit=4.0)
    stream = Stream()
    for index in range(2):
        engine.add(bulk(f"b{index}", range(index, 40 + index), 60))
    came = 0
    streams: dict[str, int] = {}
    for _ in range(40 * PATIENCE):
        while sum(name not in stream.finished for name in streams) < 2:
            name = f"i{came}"
            engine.add(long(name, range(came % 20, came % 20 + 8), 20))
            streams[name] = 0
            came += 1
        stream.take(engine.step())
        for name in streams:
            if name in stream.finished:
                continue
            before, streams[name] = streams[name], len(stream.token_ids[name, 0])
            assert streams[name] == before + 1, f"{name} stands still"
    assert engine.capacity().preemptions > PATIENCE
    drain(engine, stream)
    for index in range(2):
        expected = greedy_oracle(range(index, 40 + index), 60, eos=None)
        assert stream.token_ids[f"b{index}", 0] == expected


# With a budget of one token a row that decodes, a prompt and bulk are beyond it.
@pytest.mark.parametrize(("chunk", "most"), [(1, 3), (2, 3), (16, 16)])
def test_a_bulk_prompt_moves_beside_endless_interactive_ones(chunk, most):
    """Three prompts of 64 tokens are always here, for chunks of 16 or less."""
    engine, runner = make(max_running=16, prefill_chunk=chunk)
    engine.add(bulk("b", range(40), 4))
    stream, came, steps = Stream(), 0, 0
    while "b" not in stream.finished:
        while engine.capacity().num_running < 4:
            engine.add(long(f"i{came}", [came % 90] * 64, 1))
            came += 1
        stream.take(engine.step())
        steps += 1
        assert steps <= 16 * 40 + 10, "bulk starves"
    assert max(len(batch.token_ids) for batch in runner.batches) <= most
    assert stream.token_ids["b", 0] == greedy_oracle(range(40), 4, eos=None)


def test_the_share_of_bulk_is_a_sixteenth_and_the_oldest_has_it():
    engine, runner = make(max_running=16, prefill_chunk=64)
    engine.add(long("i", range(90), 2))
    old = msgspec.structs.replace(bulk("b0", range(3, 63), 2), priority=5)
    engine.add(old)
    engine.add(bulk("b1", range(7, 67), 2))
    stream = Stream()
    stream.take(engine.step())
    assert [part.query_length for part in runner.batches[-1].slices] == [60, 4]
    assert [one.num_computed for one in engine._roster.running] == [60, 0, 4]
    # The rest of the interactive one, and what it leaves: by priority, but the share.
    stream.take(engine.step())
    assert [one.num_computed for one in engine._roster.running] == [90, 30, 8]
    drain(engine, stream)


def test_a_step_that_is_paced_gives_bulk_its_share_too():
    engine, _ = make()
    engine.add(long("i", range(90), 2))
    engine.add(bulk("b", range(3, 63), 2))
    share = BulkShare()
    plans = [plan_step(engine._roster.running, 512, 2, share) for _ in range(16)]
    lengths = [[part.length for part in plan] for plan in plans]
    assert lengths == ([[2]] * 7 + [[1, 1]]) * 2


def test_a_share_costs_nothing_where_no_bulk_prompt_runs():
    engine, runner = make(max_running=16, prefill_chunk=64)
    engine.add(bulk("b", [1, 2], 90))
    stream = Stream()
    stream.take(engine.step())
    engine.add(long("i", range(90), 2))
    stream.take(engine.step())
    assert [part.query_length for part in runner.batches[-1].slices] == [1, 63]


def test_a_flood_leaves_bulk_no_slot_and_a_pause_gives_all_back():
    engine, _ = make(max_running=4)
    stream = Stream()
    for index in range(4):
        engine.add(bulk(f"b{index}", [index, 2, 3], 50))
    stream.take(engine.step())
    came = 0
    for _ in range(100):
        while engine.capacity().num_running < 12:
            engine.add(long(f"i{came}", [came % 90, 5], 3))
            came += 1
        stream.take(engine.step())
        assert all(name.startswith("i") for name in running(engine))
    while len(stream.finished) < came:
        stream.take(engine.step())
    stream.take(engine.step())
    assert running(engine) == ["b0", "b1", "b2", "b3"]
    drain(engine, stream)
    for index in range(4):
        expected = greedy_oracle([index, 2, 3], 50, eos=None)
        assert stream.token_ids[f"b{index}", 0] == expected
