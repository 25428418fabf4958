"""Windows of any text: whole sentences, in order, bounded, overlapping as asked for."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.scheduler.bulk.sentences import sentences
from tokenmill.scheduler.bulk.windows import Window, divide, gather

Count = Callable[[Sequence[str]], list[int]]


def in_bytes(texts: Sequence[str]) -> list[int]:
    return [len(text.encode("utf-8", "surrogatepass")) for text in texts]


def in_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def fewer_together(texts: Sequence[str]) -> list[int]:
    """A whole takes less than its parts, as where pieces merge."""
    return [(len(text) + 3) // 4 + 1 for text in texts]


def more_together(texts: Sequence[str]) -> list[int]:
    """A whole takes more than its parts: no tokenizer we know, but none is promised."""
    return [len(text) + len(text) // 20 for text in texts]


COUNTS = [in_bytes, in_words, fewer_together, more_together]
WORDS = st.text(
    st.characters(exclude_categories=("Zs", "Zl", "Zp", "Cc", "Cs")), max_size=12
)
LIKE_PROSE = st.lists(
    st.tuples(
        st.one_of(
            WORDS, st.sampled_from(["The", "e.g.", "Dr.", "3.14", "界世。", "end"])
        ),
        st.sampled_from(
            [" ", ". ", "! ", "\n", "\n\n", ".\n\n", "\n- ", "。", "", "  \t"]
        ),
    ),
    max_size=80,
).map(lambda pairs: "".join(word + gap for word, gap in pairs))
TEXTS = st.one_of(LIKE_PROSE, st.text(max_size=600))


def text_of(text: str, window: Window) -> str:
    return text[window.start : window.end]


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from(COUNTS), st.integers(16, 120), st.integers(0, 40))
@example("x" * 500, in_bytes, 16, 8)
@example("界" * 200 + "。" + "a b. " * 40, in_bytes, 30, 10)
def test_windows_of_any_text(text: str, count: Count, limit: int, overlap: int):
    windows = divide(text, count, limit, overlap)
    sizes = count([text_of(text, window) for window in windows])
    assert [window.tokens for window in windows] == sizes
    assert all(size <= limit for size in sizes)
    for before, after in pairwise(windows):
        assert before.start < after.start
        assert before.end < after.end
        assert not text[before.end : after.start].strip(), "nothing is left out"
        repeated = text[after.start : before.end]
        assert not repeated or count([repeated])[0] <= overlap
    if windows:
        assert not text[: windows[0].start].strip()
        assert not text[windows[-1].end :].strip()
    else:
        assert not text.strip()
    for one in sentences(text):
        if count([text[one.start : one.end]])[0] > limit:
            continue
        whole = any(w.start <= one.start and one.end <= w.end for w in windows)
        # Where a whole takes more tokens than its parts, bounds go before sentences.
        assert whole or count is more_together


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_sentences_leave_out_nothing_but_white_space(text: str):
    last = 0
    for one in sentences(text):
        assert last <= one.start < one.end
        assert not text[last : one.start].strip()
        inside = text[one.start : one.end]
        assert inside == inside.strip()
        last = one.end
    assert not text[last:].strip()


@pytest.mark.parametrize("overlap", [0, 30, 100])
def test_the_overlap_is_as_many_whole_sentences_as_fit(overlap: int):
    text = " ".join(f"Sentence {number:03} is here." for number in range(100))
    size = len("Sentence 000 is here. ")
    windows = divide(text, in_bytes, 400, overlap)
    for before, after in pairwise(windows):
        repeated = max(0, before.end - after.start)
        assert overlap - size < repeated <= overlap or repeated == overlap == 0


def test_a_sentence_longer_than_a_window_overlaps_by_words():
    text = " ".join(f"word{number:04}" for number in range(400))
    windows = divide(text, in_bytes, 200, 50)
    assert len(windows) > 10
    for before, after in pairwise(windows):
        assert 30 < before.end - after.start <= 50
        assert text[after.start - 1] == " ", "cut at a word's border"


def test_a_window_ends_at_a_paragraph_where_it_is_full_enough():
    paragraph = "One two three four. " * 9
    text = "\n\n".join(paragraph.strip() for _ in range(6))
    for window in divide(text, in_bytes, 200, 0)[:-1]:
        assert text[window.end :].startswith("\n\n")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=40), st.sampled_from(COUNTS))
def test_groups_keep_the_order_and_always_become_fewer(texts: list[str], count: Count):
    limit = 200
    groups = gather(texts, count, limit)
    assert [index for group in groups for index in group] == list(range(len(texts)))
    assert len(groups) < len(texts) or len(texts) < 2
    for group in groups:
        joined = "\n\n".join(texts[index] for index in group)
        assert count is more_together or count([joined])[0] <= limit
