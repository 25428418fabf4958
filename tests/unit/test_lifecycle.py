"""The transition table, and the page that is generated from it."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.shared.errors import IllegalTransition
from tokenmill.shared.lifecycle import (
    ACTIVE,
    TERMINAL,
    TRANSITIONS,
    WAITING,
    Event,
    State,
    after,
)

DOCS = Path(__file__).parents[2] / "docs"


@given(st.sampled_from(State), st.sampled_from(Event))
def test_every_pair_is_in_the_table_or_refused(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"'{event}' is not allowed"):
            after(state, event)


def test_the_three_sets_part_the_states() -> None:
    assert set(State) == WAITING | ACTIVE | TERMINAL
    assert not WAITING & ACTIVE
    assert not (WAITING | ACTIVE) & TERMINAL


def test_terminal_states_never_change() -> None:
    assert not [s for s, _ in TRANSITIONS if s in TERMINAL]


def test_every_waiting_or_active_job_can_be_cancelled_and_can_expire() -> None:
    for state in WAITING | ACTIVE:
        assert after(state, Event.CANCEL) is State.CANCELLED
        assert after(state, Event.EXPIRE) is State.EXPIRED


def test_every_state_leads_to_success_or_is_terminal() -> None:
    reaches = {State.SUCCEEDED}
    while True:
        more = {s for (s, _), t in TRANSITIONS.items() if t in reaches} - reaches
        if not more:
            break
        reaches |= more
    assert reaches | TERMINAL == set(State)


def test_the_page_is_what_the_table_generates() -> None:
    spec = importlib.util.spec_from_file_location(
        "make_lifecycle", DOCS / "make_lifecycle.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "lifecycle.md").read_text("utf-8") == module.page()
