"""Deltas in any disorder come out in order, once each, or ask for the log."""

import random

import pytest

from tokenmill.producer.assembler import Assembler, Fit, Position
from tokenmill.shared.errors import InvalidRequest, ProtocolError
from tokenmill.shared.messages import (
    Choice,
    Delta,
    End,
    FinishReason,
    JobResult,
    Usage,
)

STOP = FinishReason.STOP


def delta(offset: int, text: str, choice: int = 0, finish=None) -> Delta:
    ids = tuple(range(offset, offset + len(text)))
    return Delta(
        choice=choice, offset=offset, token_ids=ids, text=text, finish_reason=finish
    )


def feed(assembler: Assembler, deltas) -> str:
    return "".join(d.text for d in (assembler.add(x)[1] for x in deltas) if d)


def test_copies_are_dropped() -> None:
    assembler = Assembler()
    deltas = [delta(0, "ab"), delta(2, "c"), delta(3, "d")]
    assert feed(assembler, [*deltas[:2], *deltas]) == "abcd"
    assert assembler.num_tokens == 4


def test_a_gap_asks_for_the_log_and_takes_nothing() -> None:
    assembler = Assembler()
    assembler.add(delta(0, "ab"))
    assert assembler.add(delta(3, "d")) == (Fit.AHEAD, None)
    assert feed(assembler, [delta(2, "c"), delta(3, "d")]) == "cd"


def test_a_partial_overlap_is_not_guessed_at() -> None:
    assembler = Assembler()
    assembler.add(delta(0, "abc"))
    with pytest.raises(ProtocolError, match="2 to 5"):
        assembler.add(delta(2, "cde"))


def test_choices_advance_apart() -> None:
    assembler = Assembler()
    deltas = [delta(0, "ab"), delta(0, "xy", 1), delta(2, "c"), delta(2, "z", 1)]
    assert feed(assembler, [*deltas, *deltas]) == "abxycz"


def test_text_without_tokens_comes_once_too() -> None:
    assembler = Assembler()
    held_back = Delta(offset=2, text="!", finish_reason=STOP)
    assert feed(assembler, [delta(0, "ab"), held_back, held_back]) == "ab!"
    assert assembler.add(held_back) == (Fit.SEEN, None)


def test_two_deltas_without_tokens_at_one_offset_are_both_given() -> None:
    assembler = Assembler()
    deltas = [Delta(text="a"), Delta(text="b"), Delta(text="a")]
    assert feed(assembler, deltas) == "ab"


@pytest.mark.parametrize(
    ("from_offset", "text"),
    [(0, "abcdef"), (1, "abcdef"), (2, "cdef"), (5, "ef"), (6, ""), (99, "")],
)
def test_the_first_delta_is_the_one_with_the_wanted_token(from_offset, text) -> None:
    assembler = Assembler(from_offset)
    assert feed(assembler, [delta(0, "ab"), delta(2, "cd"), delta(4, "ef")]) == text


def test_a_result_fills_in_what_the_log_lost() -> None:
    assembler = Assembler()
    assembler.add(delta(0, "ab"))
    result = JobResult(
        id="m.0.x",
        state="succeeded",
        model="m",
        choices=(
            Choice(index=0, text="abcd", token_ids=(0, 1, 2, 3), finish_reason=STOP),
            Choice(index=1, text="x", token_ids=(9,), finish_reason=STOP),
        ),
        usage=Usage(completion_tokens=5),
    )
    assert assembler.complete(result) == [
        Delta(offset=2, token_ids=(2, 3), text="cd", finish_reason=STOP),
        Delta(choice=1, token_ids=(9,), text="x", finish_reason=STOP),
    ]
    assert assembler.end is not None
    assert assembler.end.usage.completion_tokens == 5
    assert assembler.complete(result) == []


def test_nothing_follows_the_end() -> None:
    assembler = Assembler()
    assembler.add(Delta(end=End(state="cancelled")))
    assert assembler.add(delta(0, "a")) == (Fit.SEEN, None)


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_log_and_channel_gives_the_same_text(seed: int) -> None:
    source = random.Random(seed)
    text = "".join(source.choices("abcdef", k=60))
    deltas, at = [], 0
    while at < len(text):
        size = source.randint(1, 4)
        deltas.append(delta(at, text[at : at + size]))
        at += size
    assembler, heard = Assembler(), ""
    position = 0
    while assembler.num_tokens < len(text):
        position = source.randint(0, len(deltas) - 1)
        for item in deltas[position:]:
            fit, new = assembler.add(item)
            heard += new.text if new else ""
            if fit is Fit.AHEAD:
                break
    assert heard == text


def result_of(*texts: str, state: str = "succeeded") -> JobResult:
    choices = tuple(
        Choice(index=i, text=t, token_ids=tuple(range(len(t))), finish_reason=STOP)
        for i, t in enumerate(texts)
    )
    return JobResult(id="m.0.x", state=state, model="m", choices=choices)


def reader_at(num_tokens: int, choice: int = 0) -> Assembler:
    return Assembler(positions={choice: Position(num_tokens, num_tokens)})


def test_a_reader_goes_on_where_a_delta_ends() -> None:
    for at, rest in ((0, "abcd"), (2, "cd"), (4, "")):
        assembler = reader_at(at)
        assert feed(assembler, [delta(0, "ab"), delta(2, "cd")]) == rest
        assert not assembler.has_strays


def test_a_position_in_the_midst_of_a_delta_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ends at token 1 of choice 0"):
        reader_at(1).add(delta(0, "ab"))


@pytest.mark.parametrize("result", [None, result_of("abcd"), result_of(state="failed")])
@pytest.mark.parametrize(("at", "choice"), [(5, 0), (1, 1)])
def test_a_position_ahead_of_the_log_is_refused(result, at, choice) -> None:
    assembler = reader_at(at, choice)
    assert feed(assembler, [delta(0, "ab"), delta(2, "cd")]) in ("", "abcd")
    assert assembler.has_strays
    with pytest.raises(InvalidRequest, match=f"ends at token {at} of choice {choice}"):
        assembler.check_positions(result, has_log=True)


def test_a_position_behind_what_only_the_result_has_is_good() -> None:
    assembler = reader_at(6)
    feed(assembler, [delta(0, "ab")])
    assembler.check_positions(result_of("abcdef"), has_log=True)
    assert assembler.complete(result_of("abcdef")) == [
        Delta(offset=6, finish_reason=STOP)
    ]


def test_without_a_log_every_position_within_the_result_is_good() -> None:
    for at in range(1, 5):
        reader_at(at).check_positions(result_of("abcd"), has_log=False)
    # The result of a job that did not succeed need not have its output.
    reader_at(9).check_positions(result_of(state="cancelled"), has_log=False)
    with pytest.raises(InvalidRequest):
        reader_at(5).check_positions(result_of("abcd"), has_log=False)
    with pytest.raises(InvalidRequest):
        reader_at(1).check_positions(None, has_log=False)
