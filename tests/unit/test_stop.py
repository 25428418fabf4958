"""Stop strings across token boundaries, and what may leave when."""

import pytest

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.output import OutputBuffer
from tokenmill.workers.engine.stop import StopMatcher


def feed(pieces, stops=(), *, min_tokens=0):
    """Pushes one token per piece; returns released (tokens, text) and the match."""
    table = TokenTable(tuple(p if isinstance(p, bytes) else p.encode() for p in pieces))
    output = OutputBuffer(table.start(), StopMatcher(stops) if stops else None)
    released = []
    for index in range(len(pieces)):
        stop = output.push(index, may_stop=index + 1 >= min_tokens)
        if stop is not None:
            output.finish(cut=True)
            return [*released, output.release()], stop
        released.append(output.release())
    output.finish(cut=False)
    return [*released, output.release()], None


def test_text_leaves_at_once_without_stop_strings():
    assert feed(["a", "b"]) == ([(1, "a"), (1, "b"), (0, "")], None)


def test_a_possible_stop_string_is_held_until_it_is_not_one():
    released, stop = feed(["x", "EN", "O", "ENE"], ("END",))
    assert released == [(1, "x"), (0, ""), (2, "ENO"), (0, ""), (1, "ENE")]
    assert stop is None


def test_a_stop_string_over_three_tokens_never_shows():
    released, stop = feed(["ab", "cE", "N", "Dzz", "never"], ("END",))
    assert stop == "END"
    assert released == [(1, "ab"), (0, ""), (0, ""), (3, "c")]


@pytest.mark.parametrize("split", [1, 2, 3, 5, 11])
def test_the_cut_does_not_depend_on_how_text_falls_into_tokens(split):
    text = "one two\n\nQ: three"
    pieces = [text[i : i + split] for i in range(0, len(text), split)]
    released, stop = feed(pieces, ("\n\nQ:", "never", "\n\nQ: x"))
    assert stop == "\n\nQ:"
    assert "".join(text for _, text in released) == "one two"


def test_the_string_that_is_complete_first_wins_then_the_longer():
    matcher = StopMatcher(("bcd", "b", "abc"))
    assert matcher.find("xabcd", 0) == (2, "b")
    assert StopMatcher(("bc", "abc")).find("xabcd", 0) == (1, "abc")


def test_only_ends_in_the_new_text_count():
    matcher = StopMatcher(("ab",))
    assert matcher.find("ab..", 2) is None
    assert matcher.find("xxab", 3) == (2, "ab")


def test_self_overlapping_strings_hold_the_longest_prefix():
    matcher = StopMatcher(("aab",))
    assert [matcher.uncertain(t) for t in ("", "b", "a", "aa", "aaa", "ba")] == [
        0,
        0,
        1,
        2,
        2,
        1,
    ]


def test_a_stop_string_before_min_tokens_is_output():
    released, stop = feed(["a.", "b.", "c.", "d"], (".",), min_tokens=3)
    assert stop == "."
    assert "".join(text for _, text in released) == "a.b.c"
    assert sum(count for count, _ in released) == 3


def test_bytes_and_stop_strings_are_held_together():
    smile = "🙂".encode()
    pieces = ["a", smile[:2], smile[2:], "E", "!"]
    released, _ = feed(pieces, ("🙂END",))
    assert released == [(1, "a"), (0, ""), (0, ""), (0, ""), (4, "🙂E!"), (0, "")]


def test_incomplete_bytes_at_the_end_become_a_replacement_character():
    released, _ = feed(["a", "é".encode()[:1]])
    assert released == [(1, "a"), (0, ""), (1, "\ufffd")]


def test_text_already_out_is_not_taken_back():
    table = TokenTable((b"ab", b"c"))
    output = OutputBuffer(table.start(), StopMatcher(("abc",)))
    output.push(0, may_stop=True)
    output.mark_published("ab")
    assert output.push(1, may_stop=True) == "abc"
    output.finish(cut=True)
    assert output.release() == (1, "")
    assert output.released_text == "ab"
