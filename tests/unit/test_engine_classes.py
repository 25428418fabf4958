"""Interactive requests wait for no bulk: in slots, in KV blocks and within a step."""

from collections import Counter

import msgspec
import pytest
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import FakeRunner

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.roster import Roster
from tokenmill.workers.engine.sequence import PATIENCE

TABLE = TokenTable.for_bytes()


def make(blocks: int = 400, **options) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks=blocks, block_size=4)
    # Chunks that follow the clock would make the steps of a test differ.
    options.setdefault("step_target_ms", 0.0)
    return Engine(runner, TABLE, **options), runner


def long(name: str, prompt, max_tokens: int, **sampling):
    return request(name, prompt, max_tokens=max_tokens, ignore_eos=True, **sampling)


def bulk(name: str, prompt, max_tokens: int, **sampling):
    wanted = long(name, prompt, max_tokens, **sampling)
    return msgspec.structs.replace(wanted, job_class=JobClass.BULK)


def steps_to_first_token(engine: Engine, stream: Stream, name: str) -> int:
    for count in range(1, 100):
        stream.take(engine.step())
        engine.check_integrity()
        if stream.token_ids[name, 0]:
            return count
    raise AssertionError(f"{name} gets no token")


def with_bulk(count: int, stream: Stream, *, prompt: int = 3, **options) -> Engine:
    """An engine in which bulk is at its output."""
    engine, _ = make(**options)
    for index in range(count):
        engine.add(bulk(f"b{index}", [index, *range(1, prompt)], 60))
    for _ in range(4):
        stream.take(engine.step())
    return engine


@pytest.mark.parametrize(("prompt", "steps"), [(5, 1), (13, 1), (14, 2), (40, 4)])
def test_slots_full_of_bulk_make_an_interactive_request_wait_for_nothing(prompt, steps):
    stream = Stream()
    engine = with_bulk(4, stream, max_running=4, prefill_chunk=16)
    engine.add(long("urgent", range(prompt), 8))
    # Three decode rows of bulk share the step's 16 tokens with its prompt.
    assert steps_to_first_token(engine, stream, "urgent") == steps
    assert engine.capacity().preemptions == 1
    assert engine.capacity().overruns == 0


def test_blocks_full_of_bulk_do_not_either():
    stream = Stream()
    engine = with_bulk(3, stream, blocks=20, prompt=20, kv_overcommit=8.0)
    engine.add(long("urgent", range(50, 66), 8))
    assert steps_to_first_token(engine, stream, "urgent") == 1
    drain(engine, stream)
    assert next(iter(stream.finished)) == "urgent"


def test_no_more_bulk_yields_than_is_in_the_way():
    engine, _ = make(blocks=24, kv_overcommit=8.0)
    stream = Stream()
    for index, prompt in enumerate((9, 30, 10)):  # 3, 8 and 3 blocks at their start
        engine.add(bulk(f"b{index}", [index, *range(1, prompt)], 3))
    stream.take(engine.step())
    engine.add(long("urgent", range(40, 76), 5))
    # 9 blocks and two to grow are wanted, 10 are free; the youngest holds 3.
    assert steps_to_first_token(engine, stream, "urgent") == 1
    assert engine.capacity().preemptions == 1
    assert [one.request.id for one in engine._roster.waiting] == ["b2"]


def test_a_small_holder_is_spared_where_a_larger_one_is_enough():
    engine, _ = make(blocks=16, kv_overcommit=8.0)
    stream = Stream()
    for index, prompt in enumerate((30, 5)):  # 8 and 2 blocks
        engine.add(bulk(f"b{index}", [index, *range(1, prompt)], 2))
    stream.take(engine.step())
    engine.add(long("urgent", range(40, 72), 4))
    assert steps_to_first_token(engine, stream, "urgent") == 1
    assert [one.request.id for one in engine._roster.waiting] == ["b0"]


def test_nobody_yields_in_vain():
    engine, _ = make(blocks=20, kv_overcommit=8.0, max_running=8)
    stream = Stream()
    engine.add(long("first", range(48), 16))  # 12 blocks, 4 more to come
    engine.add(bulk("b", [1, 2, 3], 12))
    stream.take(engine.step())
    engine.add(long("second", range(50, 82), 8))  # 8 blocks: not beside the first
    stream.take(engine.step())
    assert engine.capacity().preemptions == 0
    assert len(stream.token_ids["b", 0]) == 2
    drain(engine, stream)
    assert stream.finished.keys() == {"first", "second", "b"}


def test_bulk_prompts_leave_the_step_to_an_interactive_one():
    engine, runner = make(prefill_chunk=16)
    engine.add(bulk("b0", range(60), 4))
    engine.add(bulk("b1", range(20, 80), 4))
    stream = Stream()
    stream.take(engine.step())
    engine.add(long("urgent", range(40, 52), 4))
    assert steps_to_first_token(engine, stream, "urgent") == 1
    lengths = [part.query_length for part in runner.batches[-1].slices]
    assert lengths == [12, 4]  # bulk has what is left
    stream.take(engine.step())
    lengths = [part.query_length for part in runner.batches[-1].slices]
    assert lengths == [1, 15]


def test_nor_does_bulk_that_a_step_without_memory_left_out_go_first():
    engine, runner = make(prefill_chunk=64)
    engine.add(bulk("b0", range(30), 4))
    engine.add(bulk("b1", range(50, 80), 4))
    runner.max_rows = 20
    stream = Stream()
    stream.take(engine.step())
    engine.add(long("urgent", range(40, 52), 4))
    assert steps_to_first_token(engine, stream, "urgent") == 1


def test_without_memory_a_prompt_waits_one_step_behind_rows_of_bulk():
    engine, runner = make()
    stream = Stream()
    for index in range(12):
        engine.add(bulk(f"b{index}", [index, 2], 40))
    stream.take(engine.step())
    runner.max_rows = 5
    for _ in range(6):
        stream.take(engine.step())
    engine.add(long("urgent", [5, 6, 7, 8], 4))
    assert steps_to_first_token(engine, stream, "urgent") <= 2
    drain(engine, stream)
    for index in range(12):
        expected = greedy_oracle([index, 2], 40, eos=None)
        assert stream.token_ids[f"b{index}", 0] == expected


def test_bulk_between_interactive_requests_never_makes_them_wait():
    """One slot, and requests that come one by one: bulk moves on in each gap."""
    engine, _ = make(max_running=1)
    engine.add(bulk("b", [1, 2, 3], 60, temperature=0.8, logprobs=1))
    stream = Stream()
    for index in range(3 * PATIENCE):
        stream.take(engine.step())
        name = f"i{index}"
        engine.add(long(name, [index, 5], 2))
        assert steps_to_first_token(engine, stream, name) == 1
        stream.take(engine.step())
    assert engine.capacity().preemptions == 3 * PATIENCE
    drain(engine, stream)
    alone, _ = make()
    alone.add(bulk("b", [1, 2, 3], 60, temperature=0.8, logprobs=1))
    assert stream.finished["b"].choices == drain(alone).finished["b"].choices


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_preempted_bulk_ends_as_it_would_alone(prefix_cache, n):
    sampling = {
        "n": n,
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
        "logprobs": 2,
        "min_tokens": 20,
        "stop": ("zq",),
    }
    wanted = [bulk(f"b{i}", [i, 7, 9], 30, **sampling) for i in range(3)]
    engine, _ = make(max_running=3, prefix_cache=prefix_cache)
    stream = Stream()
    for one in wanted:
        engine.add(one)
    for index in range(20):
        for _ in range(2):
            stream.take(engine.step())
        engine.add(long(f"i{index}", [index, 4], 3))
    drain(engine, stream)
    assert engine.capacity().preemptions >= 10
    for one in wanted:
        alone, _ = make()
        alone.add(one)
        assert stream.finished[one.id].choices == drain(alone).finished[one.id].choices


def test_what_was_preempted_is_found_again_in_the_prefix_cache():
    rows = {}
    for prefix_cache in (True, False):
        engine, runner = make(max_running=1, prefix_cache=prefix_cache)
        engine.add(bulk("b", range(41), 20))
        stream = Stream()
        for _ in range(4):
            stream.take(engine.step())
        engine.add(long("urgent", [5, 6], 2))
        drain(engine, stream)
        rows[prefix_cache] = runner.gemm_rows
        expected = greedy_oracle(range(41), 20, eos=None)
        assert stream.token_ids["b", 0] == expected
    assert rows[False] - rows[True] == 44  # eleven full blocks


def test_an_interactive_request_in_the_place_of_bulk_is_no_overrun():
    engine, _ = make(blocks=20, max_running=2)
    for index in range(2):
        engine.add(bulk(f"b{index}", range(index, 20 + index), 20))
    for index in range(2):
        engine.add(long(f"i{index}", range(index, 20 + index), 20))
    assert engine.capacity().overruns == 0
    engine.add(long("i2", range(20), 20))
    assert engine.capacity().overruns == 1
    engine.add(bulk("b2", range(20), 20))
    assert engine.capacity().overruns == 2
    drain(engine)


def test_bulk_yields_to_one_interactive_request_once(monkeypatch):
    """It gave its slot up; it is not let in again where its blocks would be wanted."""
    yields = Counter()
    preempt = Roster.preempt

    def counted(roster, sequence, asking):
        yields[sequence.request.id, asking.request.id] += 1
        preempt(roster, sequence, asking)

    monkeypatch.setattr(Roster, "preempt", counted)
    engine, _ = make(blocks=20, max_running=2)
    stream = Stream()
    engine.add(bulk("b0", range(12), 12))
    engine.add(bulk("b1", range(16), 40))
    stream.take(engine.step())
    engine.add(long("urgent", range(50, 54), 60))
    drain(engine, stream)
    assert yields == {("b1", "urgent"): 1}
    assert list(stream.finished) == ["b0", "urgent", "b1"]
