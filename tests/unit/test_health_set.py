"""Health sets: what a file may hold, what passes, what a text's perplexity is."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.fake_runner import VOCAB, FakeRunner, context_logits

from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.health_set import (
    MOST_BYTES,
    HealthCheck,
    parse_health_set,
    read_health_set,
)
from tokenmill.shared.messages import ModelCard
from tokenmill.workers import health_set
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.health_answer import problem_of, problem_of_text
from tokenmill.workers.health_perplexity import ROWS, token_losses
from tokenmill.workers.health_set import run_health_set


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("[1]", "check"),
        ("{", "check"),
        ('{"prompt": "a", "exakt": "b"}', "exakt"),
        ('{"exact": "b"}', "prompt"),
        ('{"prompt": "a", "text": "b", "exact": "c"}', "prompt"),
        ('{"prompt": "", "exact": "c"}', "prompt"),
        ('{"prompt": "a"}', "exact"),
        ('{"prompt": "a", "exact": "b", "prefix": "c"}', "exact"),
        ('{"prompt": "a", "contains": ""}', "contains"),
        ('{"prompt": "a", "exact": 3}', "exact"),
        ('{"prompt": "a", "regex": "("}', "regex"),
        ('{"prompt": "a", "exact": "b", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "exact": "b", "max_perplexity": 3}', "max_perplexity"),
        ('{"text": "a"}', "max_perplexity"),
        ('{"text": "a", "max_perplexity": 1}', "max_perplexity"),
        ('{"text": "a", "max_perplexity": 9, "exact": "b"}', "exact"),
    ],
)
def test_a_bad_line_is_named_with_its_field(line: str, field: str) -> None:
    data = f'{{"prompt": "a", "exact": "b"}}\n\n{line}\n'.encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_health_set(data, "set.jsonl")
    assert caught.value.field == f"set.jsonl line 3: {field}"


def test_a_set_has_something_and_is_bounded(tmp_path) -> None:
    with pytest.raises(InvalidRequest, match="no line"):
        parse_health_set(b"\n", "set")
    long = b'{"prompt": "%s", "exact": "b"}' % (b"a" * MOST_BYTES)
    with pytest.raises(InvalidRequest, match=f"at most {MOST_BYTES}"):
        parse_health_set(long, "set")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_health_set(tmp_path / "none")


@pytest.mark.parametrize(
    ("expected", "passes", "fails"),
    [
        ({"exact": "ab"}, "ab", "ab "),
        ({"prefix": "ab"}, "abc", "cab"),
        ({"contains": "b"}, "abc", "acc"),
        ({"regex": "^a.c$"}, "abc", "abcd"),
    ],
)
def test_an_output_is_held_against_what_was_expected(expected, passes, fails) -> None:
    check = HealthCheck(prompt="p", **expected)
    assert problem_of(check, passes) is None
    assert repr(fails) in (problem_of(check, fails) or "")


def test_a_regex_that_tries_too_many_ways_has_failed_while_others_go_on() -> None:
    check = HealthCheck(prompt="p", regex="(a|a)*$")
    said: list[str | None] = []

    def search() -> None:
        said.append(problem_of(check, "a" * 60 + "b", match_s=0.3))

    thread = threading.Thread(target=search)
    thread.start()
    turns = 0
    while thread.is_alive():  # Python's lock is free meanwhile
        turns += 1
        thread.join(0.001)
    assert turns > 5
    assert "its regex '(a|a)*$' took longer than 0.3 s on 'aaa" in str(said[0])


def test_a_perplexity_that_is_no_number_fails() -> None:
    check = HealthCheck(text="t", max_perplexity=9.0)
    assert problem_of_text(check, 9.0) is None
    assert problem_of_text(check, 9.01)
    assert problem_of_text(check, math.nan)
    assert problem_of_text(check, math.inf)


def test_losses_are_those_of_the_whole_text_over_several_steps() -> None:
    runner = FakeRunner()
    ids = [(7 * n) % VOCAB for n in range(2 * ROWS + 5)]
    losses = token_losses(runner, ids)
    wanted = []
    for place in range(1, len(ids)):
        logits = context_logits(ids[:place]).astype(np.float64)
        wanted.append(np.log(np.exp(logits).sum()) - logits[ids[place]])
    assert len(runner.batches) == 3
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)
    # Just one token more than whole steps: its row foretells nothing.
    assert len(token_losses(FakeRunner(), ids[: ROWS + 1])) == ROWS
    with pytest.raises(InvalidRequest, match="expected 2 to 128"):
        token_losses(FakeRunner(), [1])


def loaded(runner: FakeRunner | None = None) -> SimpleNamespace:
    card = ModelCard(
        model="m",
        max_context=128,
        vocab_size=257,
        tokenizer="bytes",
        has_chat_template=True,
        weights_version="w",
    )
    return SimpleNamespace(
        engine=EchoEngine(), card=card, bundle=None, runner=runner, model=ModelConfig()
    )


def test_a_run_tells_every_check_that_failed_by_its_line() -> None:
    data = b"""{"prompt": "hello", "exact": "hello"}
{"prompt": "hello", "exact": "bye"}
{"text": "hello", "max_perplexity": 5}
{"messages": [{"role": "user", "content": "x"}], "contains": "x"}
"""
    report = run_health_set(parse_health_set(data, "set"), loaded(), "g")
    assert not report.passed
    assert (report.num_checks, report.num_failed) == (4, 2)
    assert report.failures[0].startswith("line 2: expected exactly 'bye', got 'hello'")
    assert "knows no probabilities" in report.failures[1]


def test_texts_bound_the_perplexity_of_the_model() -> None:
    runner = FakeRunner(vocab_size=257)
    line = b'{"text": "some words", "max_perplexity": %s}'
    low, high = (
        run_health_set(parse_health_set(line % bound, "set"), loaded(runner), "g")
        for bound in (b"2", b"1e9")
    )
    losses = token_losses(FakeRunner(vocab_size=257), list(b"some words"))
    assert high.passed
    assert high.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)))
    assert not low.passed


def test_a_set_that_takes_too_long_fails(monkeypatch) -> None:
    monkeypatch.setattr(health_set, "LONGEST_S", -1.0)
    checks = parse_health_set(b'{"prompt": "a", "exact": "a"}', "set")
    report = run_health_set(checks, loaded(), "g")
    assert "no end of its output" in report.failures[0]
