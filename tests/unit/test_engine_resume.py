"""A job taken over by another worker goes on as if nothing had happened."""

import pytest
from support.engine_driver import Stream, drain, request
from support.fake_runner import FakeRunner, context_logits

from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.messages import FinishReason
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import Emitted, EngineRequest

PIECES = tuple(
    "🙂".encode()[i : i + 1] if i < 4 else chr(ord("a") + i % 5).encode()
    for i in range(97)
)
"""Bytes of a smile and few letters: characters and stop strings straddle tokens."""


def engine() -> Engine:
    return Engine(FakeRunner(), TokenTable(PIECES), prefill_chunk=16)


VARIANTS = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "top_p": 0.95, "logprobs": 2},
    "penalties": {
        "temperature": 0.6,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.8,
    },
    "stop": {"temperature": 2.0, "stop": ("abc", "dab", "ee")},
    "min_tokens": {"temperature": 1.0, "min_tokens": 9, "stop": ("a", "b")},
    "choices": {"temperature": 1.0, "n": 3, "logprobs": 0, "stop": ("cc",)},
}


def resumed(base: EngineRequest, emitted) -> EngineRequest:
    return EngineRequest(
        id=base.id,
        token_ids=base.token_ids,
        sampling=base.sampling,
        seed=base.seed,
        emitted=emitted,
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_resume_after_any_step_equals_an_uninterrupted_run(name, seed):
    base = request("a", range(9), seed=seed, max_tokens=14, **VARIANTS[name])
    choices = base.sampling.n
    whole_engine = engine()
    whole_engine.add(base)
    whole = drain(whole_engine)
    for steps in range(1, 16):
        first, stream = engine(), Stream()
        first.add(base)
        for _ in range(steps):
            stream.take(first.step())
        if "a" in stream.finished:
            break
        emitted = stream.emitted("a", choices)
        second, after = engine(), Stream()
        after.resume_at("a", emitted)
        second.add(resumed(base, emitted))
        drain(second, after)
        assert after.finished["a"].choices == whole.finished["a"].choices
    assert steps > 1


def test_finished_choices_stay_finished_and_say_nothing_more():
    base = request("a", [1, 2], n=2, temperature=1.0, max_tokens=6)
    done = Emitted(
        token_ids=(10, 11),
        text="ab",
        finish_reason=FinishReason.STOP,
        stop_reason="c",
    )
    made, stream = engine(), Stream()
    stream.resume_at("a", (done, Emitted()))
    made.add(resumed(base, (done, Emitted())))
    drain(made, stream)
    first, second = stream.finished["a"].choices
    assert (first.text, first.stop_reason) == ("ab", "c")
    assert len(second.token_ids) == 6
    assert {delta.choice for delta in stream.deltas} == {1}


def test_a_job_whose_choices_had_all_ended_is_finished_by_the_next_step():
    done = Emitted(token_ids=(5,), text="a", finish_reason=FinishReason.LENGTH)
    made = engine()
    made.add(resumed(request("a", [1], max_tokens=1), (done,)))
    assert made.has_work
    output = made.step()
    assert output.deltas == ()
    assert output.finished[0].choices[0].token_ids == (5,)
    assert not made.has_work


def test_an_end_that_was_not_published_is_published_by_the_replay():
    made = engine()
    made.add(resumed(request("a", [1], max_tokens=2), (Emitted((5, 6), "ab"),)))
    output = made.step()
    [delta] = output.deltas
    assert (delta.offset, delta.token_ids, delta.text) == (2, (), "")
    assert delta.finish_reason is FinishReason.LENGTH
    assert output.finished[0].choices[0].token_ids == (5, 6)


def test_an_end_owed_by_a_cancelled_request_is_not_paid_by_its_successor():
    made, stream = engine(), Stream()
    made.add(resumed(request("a", [1], max_tokens=2), (Emitted((5, 6), "ab"),)))
    assert made.cancel("a")
    made.add(request("a", [1], max_tokens=3))
    drain(made, stream)
    assert stream.deltas[0].offset == 0
    assert len(stream.token_ids["a", 0]) == 3


def test_replayed_tokens_are_prefilled_and_the_next_is_drawn_after_them():
    made, stream = engine(), Stream()
    emitted = (Emitted((40, 41), "ab"),)
    made.add(resumed(request("a", [1, 2], max_tokens=3), emitted))
    assert made.capacity().prefill_backlog == 4
    stream.resume_at("a", emitted)
    drain(made, stream)
    expected = int(context_logits([1, 2, 40, 41]).argmax())
    assert stream.token_ids["a", 0] == [40, 41, expected]


def test_emitted_must_match_the_choices_and_the_vocabulary():
    made = engine()
    with pytest.raises(InvalidRequest, match="1 choices"):
        made.add(resumed(request("a", [1], n=2), (Emitted(),)))
    with pytest.raises(InvalidRequest, match="token id 97"):
        made.add(resumed(request("a", [1]), (Emitted((97,)),)))
