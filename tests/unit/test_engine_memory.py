"""KV memory under load: blocks on demand, preemption, shared prefixes, forks."""

import pytest
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import FakeRunner

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import EngineRequest


def make(blocks: int = 64, **options) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks=blocks, block_size=4)
    # Chunks that follow the clock would make the steps of a test differ.
    options.setdefault("step_target_ms", 0.0)
    return Engine(runner, TokenTable.for_bytes(), **options), runner


def of_class(job_class: JobClass, base: EngineRequest, salt: str = "") -> EngineRequest:
    return EngineRequest(
        id=base.id,
        token_ids=base.token_ids,
        sampling=base.sampling,
        seed=base.seed,
        job_class=job_class,
        cache_salt=salt,
    )


def long(name: str, prompt, max_tokens: int = 16, **sampling) -> EngineRequest:
    return request(name, prompt, max_tokens=max_tokens, ignore_eos=True, **sampling)


# --- blocks on demand ---------------------------------------------------------------
def test_a_sequence_holds_blocks_for_the_tokens_it_has():
    engine, _ = make(prefill_chunk=6)
    engine.add(long("a", range(10), 30))
    held = []
    for _ in range(8):
        engine.step()
        room = engine.capacity()
        held.append((room.used_tokens, room.allocated_tokens))
    assert held == [
        (6, 8),
        (10, 12),
        (11, 12),
        (12, 12),
        (13, 16),
        (14, 16),
        (15, 16),
        (16, 16),
    ]


def test_more_sequences_run_than_their_whole_lives_would_allow():
    engine, _ = make(blocks=16, kv_overcommit=2.0)
    for i in range(4):
        engine.add(long(f"r{i}", [i, i, i], 20))  # six blocks each in the end
    stream = Stream()
    stream.take(engine.step())
    assert engine.capacity().used_tokens == 4 * 3
    drain(engine, stream)
    assert engine.capacity().overruns == 0
    for i in range(4):
        assert stream.token_ids[f"r{i}", 0] == greedy_oracle([i] * 3, 20, eos=None)


def test_admission_leaves_room_for_those_who_run_to_grow():
    engine, runner = make(blocks=9, kv_overcommit=3.0)
    engine.add(long("a", range(8), 16))
    engine.add(long("b", range(40, 56), 8))
    stream = Stream()
    stream.take(engine.step())
    # Two and four blocks would fit; they would be wanted back within a few steps.
    assert [len(batch.slices) for batch in runner.batches] == [1]
    drain(engine, stream)
    assert engine.capacity().preemptions == 0


# --- preemption ---------------------------------------------------------------------
def squeezed(*requests, **options):
    """Runs requests of the same size in a pool that is too small for them."""
    engine, runner = make(blocks=13, kv_overcommit=8.0, **options)
    for one in requests:
        engine.add(one)
    return engine, runner


def test_the_youngest_yields_and_repeats_nothing():
    requests = [long(f"r{i}", [i, 1, 2], 24, logprobs=1) for i in range(3)]
    engine, _ = squeezed(*requests)
    stream = drain(engine)
    assert engine.capacity().preemptions > 0
    assert list(stream.finished) == ["r0", "r1", "r2"]
    for one in requests:
        assert stream.token_ids[one.id, 0] == greedy_oracle(one.token_ids, 24, eos=None)
        assert len(stream.logprobs[one.id, 0]) == 24


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sampler_state_and_text_survive_preemption(prefix_cache):
    sampling = {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logprobs": 2,
        "min_tokens": 20,
    }
    requests = [long(f"r{i}", [i, 1, 2], 24, **sampling) for i in range(3)]
    engine, _ = squeezed(*requests, prefix_cache=prefix_cache)
    together = drain(engine)
    assert engine.capacity().preemptions > 0
    for one in requests:
        alone, _ = make()
        alone.add(one)
        expected = drain(alone).finished[one.id].choices
        assert together.finished[one.id].choices == expected


def late_interactive(max_tokens: int = 24, **options):
    """Two bulk sequences, then an interactive one; there is no room for all three."""
    engine, runner = squeezed(
        *(of_class(JobClass.BULK, long(f"b{i}", [i, 1, 2], 24)) for i in range(2)),
        **options,
    )
    stream = Stream()
    for _ in range(3):
        stream.take(engine.step())
    engine.add(long("urgent", [7, 1, 2], max_tokens))
    return engine, runner, stream


def test_bulk_yields_to_interactive_that_came_later():
    engine, _, stream = late_interactive()
    for _ in range(24):
        stream.take(engine.step())
    # One token in each step: it never waited and nothing of it was computed twice.
    assert "urgent" in stream.finished
    assert engine.capacity().preemptions == 1
    drain(engine, stream)
    assert list(stream.finished) == ["b0", "urgent", "b1"]
    for name, first in [("b0", 0), ("b1", 1), ("urgent", 7)]:
        expected = greedy_oracle([first, 1, 2], 24, eos=None)
        assert stream.token_ids[name, 0] == expected


def test_a_preempted_sequence_finds_its_blocks_in_the_cache():
    rows = {}
    for prefix_cache in (True, False):
        engine, runner, stream = late_interactive(16, prefix_cache=prefix_cache)
        drain(engine, stream)
        assert engine.capacity().preemptions == 1
        rows[prefix_cache] = runner.gemm_rows
    # Of its four full blocks the last two were needed before it ran again.
    assert rows[True] == rows[False] - 8


def test_what_was_preempted_goes_before_what_came_later():
    requests = [long(f"r{i}", [i, 1, 2], 24) for i in range(3)]
    engine, _ = squeezed(*requests)
    stream = Stream()
    while not engine.capacity().preemptions:
        stream.take(engine.step())
    engine.add(long("late", [9, 9, 9], 24))
    drain(engine, stream)
    assert list(stream.finished) == ["r0", "r1", "r2", "late"]


def test_a_lone_sequence_that_needs_the_whole_pool_ends():
    engine, _ = make(blocks=8)
    engine.add(long("a", range(20), 12))
    stream = drain(engine)
    assert stream.token_ids["a", 0] == greedy_oracle(range(20), 12, eos=None)
    assert engine.capacity().preemptions == 0


# --- prefix cache ---------------------------------------------------------------------
def test_a_second_prompt_computes_only_what_is_new():
    engine, runner = make()
    shared = list(range(21))
    engine.add(long("a", [*shared, 50], 4))
    drain(engine)
    before = runner.gemm_rows
    engine.add(long("b", [*shared, 60, 61], 4))
    stream = drain(engine)
    assert stream.token_ids["b", 0] == greedy_oracle([*shared, 60, 61], 4, eos=None)
    assert runner.gemm_rows - before == (23 - 20) + 3
    room = engine.capacity()
    assert (room.prefix_tokens_asked, room.prefix_tokens_hit) == (22 + 23, 20)


def test_output_is_found_again_as_the_beginning_of_the_next_turn():
    engine, runner = make()
    engine.add(long("a", range(10), 12))
    output = drain(engine).token_ids["a", 0]
    before = runner.gemm_rows
    engine.add(long("b", [*range(10), *output, 5], 2))
    drain(engine)
    assert runner.gemm_rows - before == (23 - 20) + 1


def test_prompts_that_arrive_together_wait_for_the_first_to_compute_what_they_share():
    engine, runner = make(blocks=200)
    shared = list(range(40))
    prompts = {f"r{i}": [*shared, 50 + i, 1, 2] for i in range(12)}
    for name, prompt in prompts.items():
        engine.add(long(name, prompt, 5))
    stream = drain(engine)
    for name, prompt in prompts.items():
        assert stream.token_ids[name, 0] == greedy_oracle(prompt, 5, eos=None)
    assert runner.gemm_rows == 43 + 11 * 3 + 12 * 4


def test_unlike_prompts_do_not_wait():
    engine, runner = make(blocks=200)
    for i in range(5):
        engine.add(long(f"r{i}", [i, *range(20)], 2))
    engine.step()
    assert len(runner.batches[0].slices) == 5


def test_tenants_weights_and_other_requests_are_kept_apart():
    engine, runner = make()
    prompt = range(20)
    engine.add(of_class(JobClass.BULK, long("a", prompt, 2), salt="one"))
    drain(engine)
    engine.add(of_class(JobClass.BULK, long("b", prompt, 2), salt="two"))
    drain(engine)
    assert engine.capacity().prefix_tokens_hit == 0
    runner.weights_version = "next"
    engine.add(of_class(JobClass.BULK, long("c", prompt, 2), salt="one"))
    drain(engine)
    assert engine.capacity().prefix_tokens_hit == 0
    engine.add(of_class(JobClass.BULK, long("d", prompt, 2), salt="one"))
    drain(engine)
    assert engine.capacity().prefix_tokens_hit == 16


def test_where_keys_depend_on_the_length_only_equal_lengths_share():
    runner = FakeRunner(block_size=4)
    runner.kv_depends_on_length = True
    engine = Engine(runner, TokenTable.for_bytes())
    for name, length, hit in [("a", 20, 0), ("b", 21, 0), ("c", 20, 16)]:
        before = engine.capacity().prefix_tokens_hit
        engine.add(long(name, range(length), 2))
        drain(engine)
        assert engine.capacity().prefix_tokens_hit - before == hit


def test_switched_off_nothing_is_kept():
    engine, _ = make(prefix_cache=False)
    for name in ("a", "b"):
        engine.add(long(name, range(20), 4))
        drain(engine)
        assert engine.capacity().cached_blocks == 0
    assert engine.capacity().prefix_tokens_hit == 0


def test_blocks_of_a_request_with_bad_logits_serve_nobody():
    engine, runner = make()
    runner.poison[33] = float("nan")
    engine.add(long("bad", [*range(20), 33], 4))
    assert drain(engine).finished["bad"].error is not None
    assert engine.capacity().cached_blocks == 0
    runner.poison.clear()
    engine.add(long("good", [*range(20), 33], 4))
    expected = greedy_oracle([*range(20), 33], 4, eos=None)
    assert drain(engine).token_ids["good", 0] == expected
    assert engine.capacity().prefix_tokens_hit == 0


# --- forks ----------------------------------------------------------------------------
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_share_their_prompt(prefix_cache):
    engine, runner = make(blocks=200, prefix_cache=prefix_cache)
    engine.add(long("many", range(22), 6, n=5, temperature=1.0))
    stream, held = Stream(), []
    while engine.has_work:
        stream.take(engine.step())
        engine.check_integrity()
        held.append(engine.capacity().allocated_tokens // 4)
    # The prompt's five full blocks once, two tokens for each choice, then outputs.
    assert runner.gemm_rows == 22 + 4 * 2 + 5 * 5
    assert max(held) <= 5 + 5 * 2
    for choice in range(5):
        alone, _ = make(prefix_cache=False)
        alone.add(long("many", range(22), 6, n=5, temperature=1.0))
        expected = drain(alone).token_ids["many", choice]
        assert stream.token_ids["many", choice] == expected


def test_a_choice_that_ends_early_leaves_its_siblings_their_prompt():
    engine, _ = make(blocks=200)
    prompt = list(range(20))
    engine.add(long("many", prompt, 30, n=3, temperature=1.0))
    stream = Stream()
    for _ in range(4):
        stream.take(engine.step())
    assert engine.cancel("many")
    engine.check_integrity()
    assert engine.capacity().free_blocks == 200
