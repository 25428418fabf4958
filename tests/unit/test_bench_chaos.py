"""The verdict of `bench/chaos.py` on what a subscriber was given."""

import pytest
from support.bench_modules import bench_module

from tokenmill.shared.messages import Delta, FinishReason

streams = bench_module("chaos_streams")
client = bench_module("chaos_client")
check = bench_module("chaos_check")
plan = bench_module("chaos_plan")
truth = bench_module("chaos_truth")


def delta(offset: int, *ids: int, choice: int = 0, end: str | None = None, text="a"):
    return {"c": choice, "o": offset, "i": list(ids), "x": text, "f": end}


def begin(first: int = 0):
    return {"resume": first}


WHOLE = [begin(), delta(0, 7), delta(1, 8), delta(2, 9, end="stop")]
END = {"end": "succeeded", "result": "succeeded", "texts": ["aaa"]}


def ids_of(lines) -> list[int]:
    return streams.output_of_stream(lines)[0].ids


def test_a_stream_without_fault_is_joined():
    assert ids_of([*WHOLE, END]) == [7, 8, 9]


@pytest.mark.parametrize(
    ("lines", "breach"),
    [
        ([begin(), delta(0, 7), delta(0, 7)], "given twice"),
        ([begin(), delta(0, 7), delta(1, 8), delta(0, 7)], "given twice"),
        ([begin(), delta(0, 7), delta(1, 8), delta(0, 7, 8)], "a gap or a repeat"),
        ([begin(), delta(0, 7), delta(2, 9), delta(1, 8)], "a gap or a repeat"),
        ([begin(), delta(1, 8)], "though 0 was wanted"),
        ([*WHOLE, delta(3, 5)], "after the end of this choice"),
        ([*WHOLE, delta(2, 9, end="stop")], "after the end of this choice"),
        ([*WHOLE, END, delta(3, 5)], "after the end"),
        ([*WHOLE, END, END], "after the end"),
        ([begin(), delta(0, text="a"), delta(0, text="a")], "given twice"),
        ([delta(0, 7)], "before the stream was begun"),
    ],
)
def test_what_one_incarnation_must_not_be_given(lines, breach):
    with pytest.raises(ValueError, match=breach):
        streams.output_of_stream(lines)


def test_copies_of_what_an_earlier_incarnation_had_are_counted_once():
    first = [begin(), delta(0, 7), delta(1, 8), delta(0, 5, choice=1)]
    # The first choice is ahead of the offset that both resume from.
    second = [begin(1), delta(1, 8), delta(2, 9), delta(1, 6, choice=1)]

    found = streams.output_of_stream([*first, *second])

    assert found[0].ids == [7, 8, 9]
    assert found[1].ids == [5, 6]
    assert found[0].text == "aaa"


@pytest.mark.parametrize(
    ("again", "breach"),
    [
        ([begin(2), delta(1, 8), delta(2, 9)], "before the wanted offset 2"),
        ([begin(2), delta(0, 7)], "before the wanted offset 2"),
        ([begin(2), delta(3, 9)], "though 2 was wanted"),
        ([begin(2), delta(2, 9), delta(2, 9)], "given twice"),
        ([begin(1), delta(1, 4)], "then offset 1"),
        ([begin(1), delta(1, 8, 9)], "then offset 1"),
        ([begin(1), delta(1, 8), delta(1, 8)], "given twice"),
    ],
)
def test_what_a_resumed_incarnation_must_not_be_given(again, breach):
    first = [begin(), delta(0, 7), delta(1, 8)]

    with pytest.raises(ValueError, match=breach):
        streams.output_of_stream([*first, *again])


def test_a_client_resumes_where_its_last_incarnation_was():
    before = client.Stream()
    for line in (delta(0, 7, 8), delta(0, 5, choice=1), delta(2, 9)):
        before.restore(line)

    assert before.first(1) == 3
    assert before.first(2) == 1
    assert before.first(3) == 0
    assert not before.over


def test_the_journal_has_every_delta_as_it_came():
    given = Delta(
        choice=1,
        offset=4,
        token_ids=(3, 2),
        text="ab",
        finish_reason=FinishReason.STOP,
    )

    line = client.line_of(given)

    assert streams.key_of(line) == (1, 4, (3, 2), "ab", "stop")


def test_a_copy_is_no_progress():
    lines = [
        {"t": 1.0, **delta(0, 7)},
        {"t": 2.0, **delta(0, 7)},
        {"t": 3.0, **delta(1, 8)},
    ]

    assert list(streams.progress(lines)) == [1.0, 3.0]


SEED = 1


def breaches_of(given) -> list[str]:
    """What the check says of job 0, whose only fault can be what a subscriber had."""
    job = plan.make_job(SEED, 0)
    choice = {
        "index": 0,
        "token_ids": [7, 8, 9],
        "text": "aaa",
        "finish_reason": "stop",
    }
    result = {"state": "succeeded", "choices": [choice]}
    log = [
        ("1-1", {"token_ids": [7, 8], "text": "aa"}),
        (
            "1-2",
            {
                "offset": 2,
                "token_ids": [9],
                "text": "a",
                "finish_reason": "stop",
                "end": {},
            },
        ),
    ]
    found = truth.Truth(
        jobs={"a": truth.JobTruth({"state": "succeeded"}, result, log)},
        ends={"a": ["succeeded"]},
        submitted={0: {"a"}},
        streams={(which, 0): given for which in job.streamers},
        starts={},
        errors=[],
    )
    checker = check.Checker(found, SEED, 1, {job.variant: result})
    checker.run()
    return checker.breaches


def test_the_whole_check_passes_a_right_journal_and_tells_of_a_repeated_token():
    assert breaches_of([*WHOLE, END]) == []
    repeated = [begin(), delta(0, 7), delta(0, 7), *WHOLE[2:], END]
    (breach,) = breaches_of(repeated)
    assert "given twice" in breach
    (breach,) = breaches_of([*WHOLE, END, delta(3, 5)])
    assert "after the end" in breach
    (breach,) = breaches_of([*WHOLE])
    assert "saw the ends []" in breach
