"""Faults: one request's own, the step's, and memory that runs out."""

from itertools import pairwise

import pytest
import torch
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import FakeRunner

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.recovery import is_out_of_memory
from tokenmill.workers.engine.sequence import Sequence


def make(**options) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(num_blocks=200)
    # Chunks that follow the clock would make the steps of a test differ.
    options.setdefault("step_target_ms", 0.0)
    return Engine(runner, TokenTable.for_bytes(), **options), runner


def test_non_finite_logits_end_their_request_alone():
    engine, runner = make()
    runner.poison[88] = float("nan")
    engine.add(request("bad", [3, 88]))
    engine.add(request("good", [5, 6]))
    stream = drain(engine)
    error = stream.finished["bad"].error
    assert error is not None
    assert error.code == "non_finite_logits"
    assert "1 of 97" in error.message
    assert stream.token_ids["good", 0] == greedy_oracle([5, 6], 8)


def test_one_failing_choice_ends_its_siblings_without_further_output():
    engine, runner = make()
    prompt = [1, 2]
    first = greedy_oracle(prompt, 1)
    runner.poison[first[0]] = float("inf")
    engine.add(request("bad", prompt, n=3))
    stream = drain(engine)
    assert stream.finished["bad"].error is not None
    assert stream.finished["bad"].choices == ()
    assert not stream.reasons


class BrokenSource:
    """A detokenizer that fails on one token."""

    def __init__(self, broken: int) -> None:
        table = TokenTable.for_bytes()
        self._broken, self._table = broken, table

    def start(self):
        detokenizer = self._table.start()
        push = detokenizer.push
        source = self

        class Broken:
            has_pending = False
            flush = detokenizer.flush

            def push(self, token_id):
                if token_id == source._broken:
                    raise ValueError("no such token")
                return push(token_id)

        return Broken()


def test_an_error_while_one_output_is_processed_ends_that_request_alone():
    runner = FakeRunner()
    broken = greedy_oracle([1, 2], 3)[2]
    assert broken not in greedy_oracle([5, 6], 8)
    engine = Engine(runner, BrokenSource(broken))
    engine.add(request("bad", [1, 2]))
    engine.add(request("good", [5, 6]))
    stream = drain(engine)
    assert "no such token" in stream.finished["bad"].error.message
    assert stream.token_ids["good", 0] == greedy_oracle([5, 6], 8)


class BreaksAtFlush(BrokenSource):
    """A detokenizer that fails when an output ends."""

    def start(self):
        detokenizer = super().start()

        def flush():
            raise ValueError("no end")

        detokenizer.flush = flush
        return detokenizer


def test_an_error_at_the_end_of_an_output_ends_that_request_alone():
    engine = Engine(FakeRunner(), BreaksAtFlush(-1))
    engine.add(request("bad", [1, 2], max_tokens=2))
    engine.add(request("good", [5, 6], max_tokens=20))
    engine.step()
    (finished,) = engine.step().finished
    assert finished.request_id == "bad"
    assert "no end" in finished.error.message
    assert engine.has_work


def test_an_error_while_a_delta_is_made_ends_that_request_alone(monkeypatch):
    take_delta = Sequence.take_delta

    def break_one(sequence):
        if (sequence.request.id, sequence.choice) == ("bad", 1):
            raise ValueError("no delta")
        return take_delta(sequence)

    monkeypatch.setattr(Sequence, "take_delta", break_one)
    engine, _ = make()
    engine.add(request("bad", [1, 2], n=3))
    engine.add(request("good", [5, 6]))
    stream = drain(engine)
    assert "no delta" in stream.finished["bad"].error.message
    assert stream.token_ids["good", 0] == greedy_oracle([5, 6], 8)


def test_an_error_while_a_token_is_drawn_ends_that_request_alone(monkeypatch):
    def broken(*_):
        raise IndexError("out of bounds")

    monkeypatch.setattr("tokenmill.workers.engine.sampler.uniform", broken)
    engine, _ = make()
    engine.add(request("bad", [1, 2], temperature=1.0))
    engine.add(request("good", [5, 6]))
    stream = drain(engine)
    error = stream.finished["bad"].error
    assert error.code == "engine_error"
    assert "out of bounds" in error.message
    assert stream.token_ids["good", 0] == greedy_oracle([5, 6], 8)


def test_a_penalty_that_raises_for_one_row_ends_that_request_alone(monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such score")

    monkeypatch.setattr(
        "tokenmill.workers.engine.penalties.TokenHistory.penalize", broken
    )
    engine, _ = make()
    engine.add(request("bad", [1, 2], repetition_penalty=1.5))
    engine.add(request("biased", [3, 4], logit_bias={5: 0.0}))
    engine.add(request("good", [5, 6]))
    stream = drain(engine)
    assert "no such score" in stream.finished["bad"].error.message
    assert stream.token_ids["biased", 0] == greedy_oracle([3, 4], 8)
    assert stream.token_ids["good", 0] == greedy_oracle([5, 6], 8)


@pytest.mark.parametrize("temperature", [1e-46, 5e-324, 1e-40, 1e-6, 1e-5])
def test_a_temperature_that_float32_cannot_hold_is_greedy(temperature):
    engine, _ = make()
    engine.add(request("cold", [1, 2], temperature=temperature, top_p=0.9, logprobs=2))
    engine.add(request("good", [5, 6]))
    stream = drain(engine)
    assert stream.token_ids["cold", 0] == greedy_oracle([1, 2], 8)
    assert stream.token_ids["good", 0] == greedy_oracle([5, 6], 8)


def test_a_failing_step_changes_nothing_and_can_be_repeated():
    engine, runner = make(prefill_chunk=4)
    stream = Stream()
    engine.add(request("a", range(11)))
    stream.take(engine.step())
    before = engine.capacity()
    runner.fail = ZeroDivisionError("kernel")
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.check_integrity()
    after = engine.capacity()
    assert (after.steps, after.used_tokens) == (before.steps, before.used_tokens)
    assert after.prefill_backlog == before.prefill_backlog == 7
    runner.fail = None
    drain(engine, stream)
    assert stream.token_ids["a", 0] == greedy_oracle(range(11), 8)


def test_abort_all_names_what_it_dropped_and_frees_everything():
    engine, _ = make(max_running=1)
    for name in ("a", "b"):
        engine.add(request(name, [1, 2]))
    engine.step()
    assert engine.abort_all() == ("a", "b")
    engine.check_integrity()
    assert engine.capacity().free_blocks == 200
    assert not engine.has_work
    engine.add(request("a", [1, 2]))
    assert drain(engine).token_ids["a", 0] == greedy_oracle([1, 2], 8)


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_a_step_that_does_not_fit_in_memory_runs_in_parts(limit):
    engine, runner = make()
    runner.max_rows = limit
    prompts = {f"r{i}": list(range(i, 2 * i + 4)) for i in range(6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    stream = drain(engine)
    for name, prompt in prompts.items():
        assert stream.token_ids[name, 0] == greedy_oracle(prompt, 8)
    assert engine.capacity().scheduled_tokens == runner.gemm_rows


def test_the_size_that_fitted_is_remembered_and_grows_back_slowly():
    engine, runner = make(prefill_chunk=64)
    runner.max_rows = 9
    for i in range(8):
        engine.add(request(f"r{i}", [i, *range(30)], max_tokens=30, ignore_eos=True))
    stream = Stream()
    stream.take(engine.step())
    # 64, 32 and 16 tokens were too many.
    assert engine.capacity().out_of_memory == 3
    for _ in range(20):
        stream.take(engine.step())
        engine.check_integrity()
    # At most every second step tries one more token.
    assert engine.capacity().out_of_memory <= 3 + 11
    runner.max_rows = None
    start = len(runner.batches)
    while engine.capacity().prefill_backlog:
        stream.take(engine.step())
    sizes = [len(batch.token_ids) for batch in runner.batches[start:]]
    assert all(late - early <= 1 for early, late in pairwise(sizes[:4]))
    assert max(sizes) > 12
    drain(engine, stream)
    for i in range(8):
        expected = greedy_oracle([i, *range(30)], 30, eos=None)
        assert stream.token_ids[f"r{i}", 0] == expected


def test_what_was_left_out_of_a_step_comes_first_in_the_next():
    engine, runner = make()
    for i in range(6):
        engine.add(request(f"r{i}", [i], max_tokens=40, ignore_eos=True))
    stream = Stream()
    stream.take(engine.step())
    runner.max_rows = 2
    for _ in range(12):
        stream.take(engine.step())
        counts = [len(stream.token_ids[f"r{i}", 0]) for i in range(6)]
        assert max(counts) - min(counts) <= 2
    assert min(counts) >= 3


def test_caches_are_released_when_memory_ran_out_and_only_then():
    engine, runner = make()
    calls = []
    runner.release_caches = lambda: calls.append(len(runner.batches))
    engine.add(request("a", range(9), ignore_eos=True))
    engine.step()
    engine.step()
    assert calls == []
    runner.max_rows = 4
    engine.add(request("b", range(40, 49), ignore_eos=True))
    engine.step()
    assert calls == [2]


def test_a_request_too_large_alone_fails_and_its_neighbours_go_on():
    """Memory runs out whenever one request's long context is in the step."""
    engine, runner = make()
    run = runner.run

    def out_of_memory_at_length(batch):
        if any(part.context_length > 12 for part in batch.slices):
            raise MemoryError("13 tokens of context")
        return run(batch)

    runner.run = out_of_memory_at_length
    engine.add(request("long", range(20), max_tokens=2))
    engine.add(request("short", [5, 6], max_tokens=8))
    stream = drain(engine)
    error = stream.finished["long"].error
    assert "1 token with a context of 13 tokens" in error.message
    assert "13 tokens of context" in error.message
    assert stream.token_ids["short", 0] == greedy_oracle([5, 6], 8)


def test_a_single_token_that_does_not_fit_fails_its_request_with_the_numbers():
    engine, runner = make()
    runner.max_rows = 0
    engine.add(request("a", range(9)))
    [finished] = engine.step().finished
    assert finished.error.code == "engine_error"
    assert "1 token with a context of 1 tokens" in finished.error.message
    engine.check_integrity()
    assert not engine.has_work


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("device"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error, expected):
    assert is_out_of_memory(error) is expected
