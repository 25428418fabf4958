"""The engine on a fake model whose tokens depend on all it can see."""

import numpy as np
import pytest
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import EOS, FakeRunner, context_logits

from tokenmill.shared.errors import InvalidRequest, KVPoolExhausted, PromptTooLong
from tokenmill.shared.messages import FinishReason, JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import EngineRequest


def engine(runner: FakeRunner | None = None, **options) -> Engine:
    # Chunks that follow the clock would make the steps of a test differ.
    options.setdefault("step_target_ms", 0.0)
    return Engine(runner or FakeRunner(), TokenTable.for_bytes(), **options)


def run(*requests, runner: FakeRunner | None = None, **options):
    made = engine(runner, **options)
    for one in requests:
        made.add(one)
    return drain(made)


def test_greedy_output_is_the_models():
    stream = run(request("a", [1, 2, 3], max_tokens=12))
    expected = greedy_oracle([1, 2, 3], 12)
    assert stream.token_ids["a", 0] == expected
    assert stream.text["a", 0] == bytes(expected).decode()
    assert stream.finished["a"].prompt_tokens == 3


@pytest.mark.parametrize("chunk", [1, 3, 8, 512])
def test_chunks_and_neighbours_change_nothing(chunk):
    prompts = {f"r{i}": list(range(i, i + 1 + 7 * i)) for i in range(8)}
    runner = FakeRunner(num_blocks=400)
    stream = run(
        *(request(name, p, ignore_eos=True) for name, p in prompts.items()),
        runner=runner,
        prefill_chunk=chunk,
        max_running=5,
    )
    # Every token once, save each output's last, which nothing follows.
    assert runner.gemm_rows == sum(len(p) + 8 - 1 for p in prompts.values())
    for name, prompt in prompts.items():
        assert stream.token_ids[name, 0] == greedy_oracle(prompt, 8, eos=None)


def test_prefill_and_decode_share_steps_and_every_token_runs_once():
    runner = FakeRunner()
    made, stream = engine(runner, prefill_chunk=6), Stream()
    made.add(request("short", [1, 2], ignore_eos=True))
    stream.take(made.step())
    made.add(request("long", range(40), ignore_eos=True))
    drain(made, stream)
    mixed = [
        [part.query_length for part in batch.slices]
        for batch in runner.batches
        if len(batch.slices) == 2
    ]
    assert [1, 5] in mixed
    # The last output token of a sequence is never run.
    assert runner.gemm_rows == (2 + 7) + (40 + 7)
    assert made.capacity().scheduled_tokens == runner.gemm_rows


def test_interactive_before_bulk_then_priority_then_arrival():
    made = engine(prefill_chunk=4, max_running=1)
    for name, job_class, priority in [
        ("bulk", JobClass.BULK, -5),
        ("late", JobClass.INTERACTIVE, 1),
        ("early", JobClass.INTERACTIVE, 1),
        ("urgent", JobClass.INTERACTIVE, 0),
    ]:
        base = request(name, [1, 2, 3], max_tokens=1)
        made.add(
            EngineRequest(
                id=name,
                token_ids=base.token_ids,
                sampling=base.sampling,
                seed=1,
                job_class=job_class,
                priority=priority,
            )
        )
    order = list(drain(made).finished)
    # "late" was let in when it came, in the place of bulk; nobody of its class yields.
    assert order == ["late", "urgent", "early", "bulk"]


def test_what_does_not_fit_waits_and_is_counted():
    made = engine(FakeRunner(num_blocks=8, block_size=4))
    made.add(request("a", range(20), max_tokens=8))
    assert made.capacity().overruns == 0
    made.add(request("b", range(3), max_tokens=5))
    assert made.capacity().overruns == 1
    assert made.capacity().num_running == 2
    assert made.capacity().prefill_backlog == 23
    stream = drain(made)
    assert list(stream.finished) == ["a", "b"]


def test_every_choice_counts_as_a_running_sequence():
    made = engine(FakeRunner(num_blocks=100), max_running=4)
    made.add(request("a", [1, 2], n=3))
    made.add(request("b", [3]))
    assert made.capacity().overruns == 0
    made.add(request("c", [4]))
    assert made.capacity().overruns == 1
    drain(made)


def test_more_choices_than_may_run_take_turns_and_are_no_overrun_alone():
    made = engine(FakeRunner(num_blocks=100), max_running=2)
    made.add(request("a", [1, 2], n=5, temperature=1.0))
    assert made.capacity().overruns == 0
    assert len(drain(made).finished["a"].choices) == 5
    made.add(request("b", [1]))
    made.add(request("c", [1, 2], n=5))
    assert made.capacity().overruns == 1
    drain(made)


def test_a_waiting_request_counts_against_the_room_of_the_next():
    made = engine(FakeRunner(num_blocks=8, block_size=4))
    made.add(request("a", range(20), max_tokens=8))
    made.add(request("b", range(20), max_tokens=8))
    made.add(request("c", [1], max_tokens=1))
    assert made.capacity().overruns == 2
    assert list(drain(made).finished) == ["a", "c", "b"]


def test_what_can_never_fit_is_refused_with_both_numbers():
    made = engine(FakeRunner(num_blocks=8, block_size=4, max_context=64))
    with pytest.raises(KVPoolExhausted, match=r"need 9 KV blocks.*pool has 8"):
        made.add(request("a", range(20), max_tokens=16))
    with pytest.raises(PromptTooLong, match=r"has 64 tokens.*may have 64"):
        made.add(request("b", range(64)))
    assert not made.has_work
    made.add(request("c", range(20), max_tokens=4))
    assert "c" in drain(made).finished


def test_output_ends_where_the_context_does():
    stream = run(
        request("a", range(28), max_tokens=100, ignore_eos=True),
        runner=FakeRunner(max_context=32),
    )
    assert len(stream.token_ids["a", 0]) == 4
    assert stream.reasons["a", 0] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request("x", []), "prompt"),
        (request("x", [5, 97]), "prompt"),
        (request("x", [-1]), "prompt"),
        (request("x", [1], max_tokens=0), "max_tokens"),
        (request("x", [1], n=0), "n"),
        (request("x", [1], stop_token_ids=(97,)), "stop_token_ids"),
        (request("x", [1], logit_bias={97: 1.0}), "logit_bias"),
    ],
)
def test_bad_fields_are_named_and_leave_nothing_behind(bad, field):
    made = engine()
    with pytest.raises(InvalidRequest) as caught:
        made.add(bad)
    assert caught.value.field == field
    assert not made.has_work


def test_the_same_id_twice_is_refused_and_the_first_goes_on():
    made = engine()
    made.add(request("a", [1, 2]))
    with pytest.raises(InvalidRequest, match="already"):
        made.add(request("a", [3]))
    assert drain(made).token_ids["a", 0] == greedy_oracle([1, 2], 8)


def first_eos(limit: int = 60) -> tuple[list[int], list[int]]:
    """A prompt whose greedy output meets the end of sequence within `limit`."""
    for start in range(400):
        prompt = [start % 90, start // 90, 7]
        output = greedy_oracle(prompt, limit)
        if output[-1] == EOS and len(output) > 2:
            return prompt, output
    raise AssertionError("no such prompt")


def test_end_of_sequence_stop_ids_and_ignore_eos():
    prompt, output = first_eos()
    stream = run(
        request("eos", prompt, max_tokens=80),
        request("ignore", prompt, max_tokens=80, ignore_eos=True),
        request("id", prompt, max_tokens=80, stop_token_ids=(output[1],)),
    )
    eos = stream.finished["eos"].choices[0]
    assert eos.token_ids == tuple(output)
    assert eos.finish_reason is FinishReason.STOP
    assert eos.stop_reason == EOS
    assert eos.text == bytes(output[:-1]).decode()
    assert len(stream.token_ids["ignore", 0]) == 80
    by_id = stream.finished["id"].choices[0]
    first = output.index(output[1])
    assert by_id.token_ids == tuple(output[: first + 1])
    assert by_id.stop_reason == output[1]


def test_a_stop_string_ends_the_text_before_it_and_keeps_its_tokens():
    text = bytes(greedy_oracle([4, 5], 20)).decode()
    stop = text[5:8]
    where = text.index(stop)
    stream = run(request("a", [4, 5], max_tokens=20, stop=(stop,)))
    choice = stream.finished["a"].choices[0]
    assert choice.text == text[:where]
    assert choice.stop_reason == stop
    assert len(choice.token_ids) == where + 3
    assert choice.finish_reason is FinishReason.STOP


def test_min_tokens_forbids_every_kind_of_stop_until_then():
    prompt, output = first_eos()
    text = bytes(greedy_oracle([4, 5], 20)).decode()
    stream = run(
        request("eos", prompt, max_tokens=80, min_tokens=len(output) + 3),
        request("string", [4, 5], max_tokens=20, min_tokens=15, stop=(text[2:4],)),
    )
    assert len(stream.token_ids["eos", 0]) >= len(output) + 3
    assert EOS not in stream.token_ids["eos", 0][: len(output) + 3]
    assert len(stream.token_ids["string", 0]) >= 15


def test_choices_are_drawn_apart_and_finish_together():
    stream = run(
        request("many", [1, 2, 3], n=4, temperature=1.0, max_tokens=10, logprobs=1),
        max_running=2,
    )
    outputs = {tuple(stream.token_ids["many", choice]) for choice in range(4)}
    assert len(outputs) == 4
    assert [c.index for c in stream.finished["many"].choices] == [0, 1, 2, 3]


def test_seeded_sampling_repeats_whatever_runs_beside_it():
    wanted = request("a", range(11), temperature=1.0, top_p=0.9, max_tokens=15, seed=3)
    alone = run(wanted)
    others = [request(f"o{i}", range(i + 1), temperature=1.5) for i in range(6)]
    together = run(*others, wanted, prefill_chunk=5)
    assert together.token_ids["a", 0] == alone.token_ids["a", 0]
    other_seed = run(
        request("a", range(11), temperature=1.0, top_p=0.9, max_tokens=15, seed=4)
    )
    assert other_seed.token_ids["a", 0] != alone.token_ids["a", 0]


def test_penalties_see_prompt_and_output_as_it_grows():
    repetition, frequency = np.float32(1.8), np.float32(0.9)
    prompt, output = [1, 2, 3, 2], []
    for _ in range(25):
        scores = context_logits(prompt + output)
        for token_id in {*prompt, *output}:
            old = scores[token_id]
            scores[token_id] = old * repetition if old < 0 else old / repetition
        for token_id in set(output):
            scores[token_id] -= frequency * np.float32(output.count(token_id))
        output.append(int(scores.argmax()))
    penalized = request(
        "a",
        prompt,
        max_tokens=25,
        ignore_eos=True,
        repetition_penalty=float(repetition),
        frequency_penalty=float(frequency),
    )
    assert run(penalized).token_ids["a", 0] == output
    assert output != greedy_oracle(prompt, 25, eos=None)


def test_cancel_frees_blocks_at_once_and_nothing_follows():
    made, stream = engine(), Stream()
    made.add(request("a", range(20), ignore_eos=True))
    made.add(request("b", range(50, 59), ignore_eos=True))
    stream.take(made.step())
    held = made.released("a", FinishReason.CANCELLED)
    assert held[0].finish_reason is FinishReason.CANCELLED
    assert made.cancel("a") is True
    assert made.cancel("a") is False
    made.check_integrity()
    # The nine tokens of b take three blocks of four; what a held can serve others.
    assert made.capacity().free_blocks == 64 - 3
    assert made.capacity().cached_blocks == 5
    after = len(stream.deltas)
    drain(made, stream)
    assert stream.finished.keys() == {"b"}
    assert all(delta.request_id == "b" for delta in stream.deltas[after:])


def test_expire_and_cancel_of_waiting_requests():
    made = engine(max_running=1)
    for name in ("a", "b", "c"):
        made.add(request(name, [1, 2]))
    assert made.expire("b")
    assert made.cancel("c")
    assert drain(made).finished.keys() == {"a"}


def test_an_idle_step_gives_nothing():
    output = engine().step()
    assert output.deltas == ()
    assert output.finished == ()


def test_the_step_time_fit_follows_the_clock():
    runner = FakeRunner(num_blocks=400, max_context=400)
    now = [0.0]

    def clock() -> float:
        # Read before and after a step: 5 ms and 0.1 ms per token, exactly.
        tokens = len(runner.batches[-1].token_ids) if runner.batches else 0
        reads[0] += 1
        if reads[0] % 2 == 0:
            now[0] += 0.005 + 0.0001 * tokens
        return now[0]

    reads = [0]
    made, stream = engine(runner, clock=clock), Stream()
    for i in range(6):
        made.add(request(str(i), range(10 * i + 1), max_tokens=12, ignore_eos=True))
        stream.take(made.step())
    drain(made, stream)
    base, slope = made.capacity().step_fit_ms
    assert base == pytest.approx(5.0, rel=0.01)
    assert slope == pytest.approx(0.1, rel=0.05)
