"""Places for attempts: a host that hangs is asked little, a quick one is soon done."""

from contextlib import ExitStack

import pytest

from tokenmill.scheduler import webhook_turns
from tokenmill.scheduler.webhook_turns import (
    LONGEST_S,
    PER_TARGET,
    Turns,
    has_share,
)

HOST = "https://hooks.example.com"


class Clock:
    """Time as the test sets it."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(webhook_turns, "time", made)
    return made


def attempt(turns, clock, seconds, count=PER_TARGET):
    """So many attempts at once that take so long."""
    with ExitStack() as stack:
        for _ in range(count):
            assert turns.wait_s(HOST) is None
            stack.enter_context(turns.place(HOST))
        clock.now += seconds
        return [turns.wait_s(HOST) for _ in range(100)]


def test_a_host_has_a_few_places_and_others_have_theirs(clock):
    turns = Turns()
    with ExitStack() as stack:
        for _ in range(PER_TARGET):
            stack.enter_context(turns.place(HOST))
        assert turns.wait_s(HOST) is not None
        assert turns.wait_s("https://other.example.com") is None
    assert turns.wait_s(HOST) is None


def test_those_that_wait_come_one_after_the_other_and_none_after_a_minute(clock):
    waits = attempt(Turns(), clock, seconds=4.0)
    # A place is free each half second.
    assert waits[:60] == pytest.approx([0.5 * (n + 1) for n in range(60)])
    assert all(LONGEST_S / 2 <= wait <= LONGEST_S for wait in waits[-30:])


def test_many_deliveries_to_a_host_that_hangs_hardly_ask(clock):
    """3,000 of them, for ten minutes, by the clock: a few tens a second, not all."""
    turns, asked = Turns(), 0
    due = [clock.now] * 3000
    running: list[tuple[float, object]] = []
    begun = clock.now
    while clock.now < begun + 600:
        while running and running[0][0] <= clock.now:
            _, place = running.pop(0)
            place.__exit__(None, None, None)
        for number, at in enumerate(due):
            if at > clock.now:
                continue
            asked += 1
            wait = turns.wait_s(HOST)
            if wait is None:
                place = turns.place(HOST)
                place.__enter__()
                running.append((clock.now + 10, place))
                wait = 3600.0
            due[number] = clock.now + wait
        clock.now += 0.5
    assert asked / 600 < 100
    assert sum(at > clock.now + 600 for at in due) > 0.7 * 600 / 10 * PER_TARGET


def test_a_quick_host_is_not_kept_waiting(clock):
    turns = Turns()
    for _ in range(3):
        waits = attempt(turns, clock, seconds=0.02)
    assert max(waits) < 1.0


def test_hosts_are_forgotten_once_nothing_waits_for_them(clock, monkeypatch):
    monkeypatch.setattr(webhook_turns, "MOST_TARGETS", 5)
    turns = Turns()
    for number in range(50):
        with turns.place(f"https://h{number}.example.com"):
            pass
    attempt(turns, clock, seconds=4.0)
    assert set(turns._targets) == {HOST}
    clock.now += LONGEST_S + 1
    for number in range(6):
        with turns.place(f"https://h{number}.example.com"):
            pass
    assert len(turns._targets) <= 5


def places(tenants, most=96, *, is_new=False):
    """How many each has when all of them take as many as they may, in turns."""
    held = [0] * tenants
    while True:
        before = sum(held)
        for one in range(tenants):
            held[one] += has_share(held[one], most - sum(held), is_new=is_new)
        if sum(held) == before:
            return held


def test_a_tenant_alone_has_half_of_the_places_and_more_for_new_hosts():
    assert places(1) == [48]
    assert places(1, is_new=True) == [64]


@pytest.mark.parametrize("tenants", [1, 2, 5, 20])
def test_some_places_are_left_for_a_tenant_that_has_none(tenants):
    held = places(tenants)
    assert max(held) - min(held) <= 1
    assert has_share(0, 96 - sum(held), is_new=False)
