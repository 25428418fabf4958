"""Sentences, words, key sentences and instructions of bulk summaries."""

import itertools
import time

import pytest

from tokenmill.scheduler.bulk.extract import key_sentences, rank
from tokenmill.scheduler.bulk.prompts import ask_for, prompt_for
from tokenmill.scheduler.bulk.sentences import sentences
from tokenmill.scheduler.bulk.words import (
    cut_at_sentence,
    limit_words,
    num_words,
    without_repeats,
)
from tokenmill.shared.bulk.messages import RunSpec

SPEC = RunSpec(kind="summarize", max_words=100, style="For children.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four…", ["One.", "Two!", "Three?", "Four…"]),
        ("See e.g. this. Dr. No came.", ["See e.g. this.", "Dr. No came."]),
        ("J. R. Hartley wrote it. Yes.", ["J. R. Hartley wrote it.", "Yes."]),
        ('"Stop." He ran.', ['"Stop."', "He ran."]),
        ("Version 3.14 is out.", ["Version 3.14 is out."]),
        ("これは文。次の文｡終わり", ["これは文。", "次の文｡", "終わり"]),
        ("هل؟ نعم. لا", ["هل؟", "نعم.", "لا"]),
        ("no end here\n\nnew paragraph", ["no end here", "new paragraph"]),
        ("wrapped\nline goes on. Next.", ["wrapped\nline goes on.", "Next."]),
        ("List:\n- one\n- two", ["List:", "- one", "- two"]),
        ("# Title\nText of it.", ["# Title", "Text of it."]),
        ("Title\n=====\nText.", ["Title\n=====", "Text."]),
        ("1. First point. 2. Second.", ["1. First point.", "2. Second."]),
        ("  \n\t ", []),
    ],
)
def test_sentences(text: str, expected: list[str]):
    assert [text[one.start : one.end] for one in sentences(text)] == expected


RUNS = (" ", "\t", "\r", "\f", "\u2029", "#", "# ", "=", "-", "~", ".", "…", "!", "。")
RUNS += ('"', '."', ")", "1", "`", "|", ">", "a", "界", "\n", "\n ", "\n#", "\n=")


@pytest.mark.parametrize("unit", RUNS)
def test_a_long_run_of_anything_takes_time_in_proportion(unit: str):
    """A pattern that runs cannot be interrupted: it would stop the whole process."""
    run = unit * (40_000 // len(unit))
    begun = time.process_time()
    for before, after in itertools.product(("", "a\n"), ("", "x")):
        sentences(f"{before}{run}{after}")
    assert time.process_time() - begun < 3.0


def test_a_sharp_in_the_midst_of_a_line_begins_no_heading():
    text = "We write C# is\nwhat he said."
    assert [text[one.start : one.end] for one in sentences(text)] == [text]
    text = "Text.\n\n  ## A heading\nMore text."
    found = [text[one.start : one.end] for one in sentences(text)]
    assert found == ["Text.", "## A heading", "More text."]


def test_paragraphs_are_marked_at_their_last_sentence():
    text = "One. Two.\n\nThree."
    assert [one.ends_paragraph for one in sentences(text)] == [False, True, True]


def test_words_are_limited_at_a_sentence_where_enough_is_left():
    text = "One two three. Four five six. Seven eight."
    assert limit_words(text, 7) == "One two three. Four five six."
    assert limit_words(text, 8) == text
    assert limit_words("A b. C d e f g h i j k", 9) == "A b. C d e f g h i"
    assert num_words(limit_words("word " * 50, 10)) == 10
    assert limit_words("  \n ", 5) == ""


def test_words_of_scripts_without_spaces_are_counted_by_their_characters():
    assert num_words("東京は 大きい。") == 6 + 1
    assert num_words("ภาษาไทย") == 2
    assert limit_words("界" * 500, 100) == "界" * 100
    assert limit_words("東京です。大阪です。京都です。", 11) == "東京です。大阪です。"
    assert num_words(key_sentences("これは長い文章です。" * 50, 20)) <= 20


def test_a_limit_of_words_bounds_text_that_never_ends():
    assert len(limit_words("QUJD" * 50_000, 10)) <= 320
    assert len(key_sentences("x" * 50_000 + ". y", 3)) <= 96


def test_a_sentence_that_is_repeated_is_said_once():
    text = "The cat sat. It slept. The  CAT sat. It slept. The end."
    assert without_repeats(text) == "The cat sat. It slept. The end."
    assert without_repeats("One.\n\nTwo.") == "One.\n\nTwo."


def test_an_unfinished_sentence_is_removed_unless_too_little_stays():
    assert cut_at_sentence("One two three. And th", least=2) == "One two three."
    assert cut_at_sentence("One. And then many more wor", least=4).endswith("wor")


def test_key_sentences_are_the_central_ones_in_their_order():
    text = (
        "The scheduler gives jobs to workers. Bananas are yellow. "
        "Workers run the jobs that the scheduler gives them. It rained. "
        "Jobs wait for the scheduler until workers have room."
    )
    chosen = key_sentences(text, 20)
    assert "Bananas" not in chosen
    assert "rained" not in chosen
    assert num_words(chosen) <= 20
    assert chosen.startswith("The scheduler gives")


@pytest.mark.parametrize(
    "text", ["x", "One two three four five six.", "...", "界" * 50]
)
def test_key_sentences_are_never_empty_for_a_text(text: str):
    assert key_sentences(text, 3)
    assert num_words(key_sentences(text, 3)) <= 3


def test_no_text_has_no_key_sentences():
    assert key_sentences(" \n", 10) == ""
    assert rank([]) == []


def test_a_long_text_is_ranked_in_runs():
    text = " ".join(
        f"Number {i} of the jobs waits for worker {i % 7}." for i in range(3000)
    )
    assert 0 < num_words(key_sentences(text, 50)) <= 50


def test_the_instruction_of_a_level_does_not_depend_on_the_document():
    ask = ask_for(SPEC, level=0, is_last=False, window_tokens=2048)
    assert ask == ask_for(SPEC, level=0, is_last=False, window_tokens=2048)
    assert "For children." in ask.instruction
    one = prompt_for(SPEC, ask, "Title one", "Text.", form="system")
    two = prompt_for(SPEC, ask, "Another", "Other text.", form="system")
    assert one.messages is not None
    assert two.messages is not None
    assert one.messages[0] == two.messages[0]
    user = prompt_for(SPEC, ask, "Title", "Text.", form="user")
    assert user.messages is not None
    [message] = user.messages
    assert message.content.startswith(f"{ask.instruction}\n\nTitle: Title")
    plain = prompt_for(SPEC, ask, "Title", "Text.", form="text")
    assert plain.text is not None
    assert plain.text.startswith(f"{ask.instruction}\n\nTitle: Title\n\n")
    above = plain.text.partition(ask.reminder)[0]
    assert "\nText.\n" in above, "the reminder comes after the text"


@pytest.mark.parametrize("window_tokens", [64, 512, 2048])
def test_partial_summaries_are_far_shorter_than_a_window(window_tokens: int):
    spec = RunSpec(kind="summarize", max_words=5000)
    ask = ask_for(spec, level=0, is_last=False, window_tokens=window_tokens)
    assert ask.max_tokens <= window_tokens // 4
    assert ask.max_words >= 1
    last = ask_for(spec, level=1, is_last=True, window_tokens=window_tokens)
    assert last.max_words == 5000
    assert "partial summaries" in last.instruction
