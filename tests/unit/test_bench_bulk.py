"""The bulk benchmark's own logic: what it would notice."""

import copy
from typing import Any

import pytest
from support.bench_modules import bench_module

from tokenmill.shared.bulk.job_ids import Place

check = bench_module("bulk_check")

RUN = "abcdefghij"
TEXT = "The mill stands by the river. Its wheel turns all day."


def job(seq: int, level: int, index: int) -> str:
    return str(Place(RUN, seq, 0, level, index).job_id("m", "t", 1))


LEAVES = [TEXT[:29], TEXT[30:]]
ASKED = {
    job(0, 0, 0): f"Summarize. {LEAVES[0]}",
    job(0, 0, 1): f"Summarize. {LEAVES[1]}",
    job(0, 1, 0): "Summarize the summaries.",
}
ANSWERED = {
    job(0, 0, 0): "A mill by a river.",
    job(0, 0, 1): "A wheel turns.",
    job(0, 1, 0): "A mill by a river turns all day long",
}
LINE: dict[str, Any] = {
    "id": "d",
    "summary": "A mill by a river turns.",
    "tree": [
        {
            "level": 0,
            "index": 0,
            "spans": [[0, 29]],
            "text": "A mill by a river.",
            "job_id": job(0, 0, 0),
        },
        {
            "level": 0,
            "index": 1,
            "spans": [[30, 54]],
            "text": "A wheel turns.",
            "job_id": job(0, 0, 1),
        },
        {
            "level": 1,
            "index": 0,
            "spans": [[0, 54]],
            "text": "A mill by a river turns.",
            "job_id": job(0, 1, 0),
        },
    ],
}


def problems(lines: list[dict[str, Any]], **changes: Any) -> list[str]:
    given: dict[str, Any] = {
        "run": RUN,
        "max_words": 8,
        "asked": ASKED,
        "answered": ANSWERED,
        **changes,
    }
    return check.problems_of(lines, [{"id": "d", "text": TEXT}], **given)


def changed(**fields: Any) -> dict[str, Any]:
    line = copy.deepcopy(LINE)
    for name, value in fields.items():
        if name == "node":
            line["tree"][value.pop("at")] |= value
        else:
            line[name] = value
    return line


def test_a_right_summary_has_no_problem() -> None:
    assert problems([LINE]) == []


def test_what_a_model_says_twice_may_stand_once() -> None:
    name = job(0, 0, 1)
    circles = ANSWERED | {name: f"{ANSWERED[name]} It does.\nA WHEEL turns. It  does."}
    line = changed(node={"at": 1, "text": "A wheel turns. It does."})
    assert problems([line], answered=circles) == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no line"),
        ([LINE, LINE], "2 lines"),
        ([LINE, changed(id="e")], "not in the input"),
        ([changed(error={"message": "no"})], "failed: no"),
        ([changed(summary=" ")], "is empty"),
        ([changed(summary="one two three four five six seven eight nine")], "9 words"),
        ([changed(summary="Something else altogether.")], "top of its tree"),
        ([changed(node={"at": 1, "spans": [[35, 54]]})], "no window has 'Its wheel"),
        ([changed(node={"at": 1, "job_id": job(3, 0, 1)})], "is of job"),
        ([changed(node={"at": 1, "text": "Of another document."})], "said something"),
        ([changed(node={"at": 1, "job_id": job(0, 0, 7)})], "is not known"),
    ],
)
def test_what_is_wrong_is_noticed(lines: list[dict[str, Any]], said: str) -> None:
    found = problems(lines)
    assert any(said in problem for problem in found), found


def test_a_job_that_was_given_another_text_is_noticed() -> None:
    asked = {**ASKED, job(0, 0, 0): "Summarize. Another document."}
    assert any("given another text" in found for found in problems([LINE], asked=asked))
