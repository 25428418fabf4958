"""`Pace` alone, on machines whose step times are given: how many steps a prompt takes
beside decode rows, and how far they are from a decode step's time.
"""

import random
from itertools import pairwise

import pytest

from tokenmill.workers.engine.pacing import (
    BULK_STEP_MS,
    BULK_WORTH,
    FIRST_CHUNK,
    FLOOR_CHUNK,
    Pace,
)
from tokenmill.workers.engine.planner import PlannedSlice


class Row:
    """What `Pace` reads of a sequence."""

    is_interactive = True

    def __init__(self, num_tokens: int, num_computed: int) -> None:
        self.num_tokens, self.num_computed = num_tokens, num_computed

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed


class Machine:
    """Interactive rows at their output; a decode step takes 5 ms, or as told."""

    def __init__(
        self, *, fixed=0.0, token=0.05, key=0.0, decode=5.0, decode_key=0.0, rows=4,
        noise=0.0,
    ) -> None:  # fmt: skip
        self.pace = Pace(None)
        self.rows = [Row(20, 19) for _ in range(rows)]
        self.fixed, self.token, self.key = fixed, token, key
        self.decode, self.decode_key = decode, decode_key
        self.noise, self.random = noise, random.Random(3)
        self.stall = 0.0
        for _ in range(20):
            self.step()

    def step(self, prompt: Row | None = None) -> tuple[int, float]:
        """Prompt tokens of a step, and its time over that without them."""
        quiet = self.decode + self.decode_key * sum(r.num_tokens for r in self.rows)
        plan = [PlannedSlice(row, row.num_computed, 1) for row in self.rows]
        took, length = quiet, 0
        if prompt is not None:
            limit = self.pace.prefill_limit([*self.rows, prompt])
            length = min(limit or 512, prompt.num_uncomputed)
            part = PlannedSlice(prompt, prompt.num_computed, length)
            keys = length * (part.start + (length + 1) / 2)
            took += self.fixed + self.token * length + self.key * keys
            plan.append(part)
        took *= 1.0 + self.random.uniform(-self.noise, self.noise)
        self.pace.observe(tuple(plan), took + (self.stall if prompt else 0.0))
        if prompt is not None:
            self.stall = 0.0
            prompt.num_computed += length
        for row in self.rows:
            row.num_computed, row.num_tokens = row.num_tokens, row.num_tokens + 1
        return length, took / quiet

    def alone(self, tokens: int) -> None:
        """A prompt that runs without decode rows."""
        plan = (PlannedSlice(Row(tokens, 0), 0, tokens),)
        self.pace.observe(plan, self.decode + self.token * tokens)

    def prompt(self, tokens: int = 2000) -> tuple[list[int], list[float]]:
        """Chunks of a prompt, and the ratios of their steps."""
        prompt, steps = Row(tokens, 0), []
        while prompt.num_uncomputed:
            steps.append(self.step(prompt))
            assert len(steps) < 1500
        return [step[0] for step in steps], [step[1] for step in steps]


@pytest.mark.parametrize(
    ("fixed", "steps", "ratio"),
    [(0, 42, 1.8), (1, 60, 1.8), (2, 65, 1.85), (10, 42, 4)],
)
def test_a_fixed_cost_of_mixed_steps_does_not_shrink_chunks(fixed, steps, ratio):
    chunks, ratios = Machine(fixed=fixed).prompt()
    assert len(chunks) <= steps
    assert max(ratios) <= ratio
    assert chunks[0] == FIRST_CHUNK


@pytest.mark.parametrize("fixed", [0, 1, 2, 10])
def test_short_prompts_before_do_not_poison_the_fit(fixed):
    alone, beside = Machine(fixed=fixed), Machine(fixed=fixed)
    for _ in range(50):
        alone.alone(6)
        beside.step(Row(6, 0))
    assert alone.prompt() == Machine(fixed=fixed).prompt()
    assert len(beside.prompt()[0]) <= 90


@pytest.mark.parametrize("fixed", [0, 1, 2, 10])
def test_one_stall_is_forgotten_at_once(fixed):
    usual = len(Machine(fixed=fixed).prompt()[0])
    first, later = Machine(fixed=fixed), Machine(fixed=fixed)
    first.stall = 5000.0
    assert len(first.prompt()[0]) <= usual + 20
    later.prompt(500)
    later.stall = 5000.0
    assert len(later.prompt()[0]) <= usual + 20


def test_a_stall_of_the_first_decode_step_is_forgotten():
    machine = Machine()
    machine.pace = Pace(None)
    machine.decode = 5000.0
    machine.step()
    machine.decode = 5.0
    machine.step()
    _, ratios = machine.prompt()
    assert max(ratios) <= 1.8


def test_chunks_recover_where_a_fixed_cost_ends_and_shrink_where_tokens_cost_more():
    machine = Machine(fixed=4.0)
    machine.prompt()
    machine.fixed, machine.token = 0.0, 0.2
    machine.prompt(3000)
    chunks, ratios = machine.prompt()
    assert 12 <= sorted(chunks)[len(chunks) // 2] <= 16
    assert max(ratios) <= 1.8
    machine.token = 0.05
    machine.prompt()
    assert len(machine.prompt()[0]) <= 42


def test_no_chunk_is_over_twice_what_was_measured_nor_a_floor_above_its_bound():
    chunks, _ = Machine(token=1e-4).prompt(20_000)
    largest = FIRST_CHUNK
    for one, after in pairwise(chunks):
        largest = max(largest, one)
        assert after <= 2 * largest
    assert max(Machine(fixed=100.0).prompt()[0]) == FLOOR_CHUNK


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("rows", [3, 8])
def test_growing_contexts_on_a_slow_machine(rows, noise):
    """Two cores: 60 ms a decode step, 4 ms a prompt token, twice that at its end."""
    shape = {"fixed": 3.0, "token": 4.0, "key": 0.002, "decode_key": 0.002}
    machine = Machine(rows=rows, decode=30.0 + 4 * rows, noise=noise, **shape)
    chunks, ratios = machine.prompt(1900)
    ratios.sort()
    assert ratios[int(0.99 * len(ratios))] <= 2.0
    assert ratios[len(ratios) // 2] >= 1.4
    assert len(chunks) <= (420 if rows == 8 else 620)


def test_noise_leaves_most_of_the_room_in_use():
    for fixed, steps in ((0, 60), (1, 90), (2, 150), (10, 60)):
        assert len(Machine(fixed=fixed, noise=0.15).prompt()[0]) <= steps


class BulkRow(Row):
    is_interactive = False


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("fixed_ms", [0.0, 60.0, 100.0, 200.0])
def test_bulk_keeps_most_of_its_rate_where_steps_are_slow(fixed_ms, noise):
    """A step's own cost is not taken for a price of its prompt tokens."""
    token_ms, whole, scatter = 2.0, 512, random.Random(5)
    pace, sizes, took = Pace(None), [], []
    for _ in range(300):
        prompt = BulkRow(100_000, 0)
        sizes.append(min(pace.prefill_limit([prompt]) or whole, whole))
        milliseconds = fixed_ms + token_ms * sizes[-1]
        milliseconds *= 1.0 + scatter.uniform(-noise, noise)
        pace.observe((PlannedSlice(prompt, 0, sizes[-1]),), milliseconds)
        took.append(fixed_ms + token_ms * sizes[-1])
    rate = sum(sizes[100:]) / sum(took[100:])
    assert rate >= 0.75 * whole / (fixed_ms + token_ms * whole)
    most_ms = max(BULK_STEP_MS, (1.0 + BULK_WORTH) * fixed_ms)
    assert sum(took[100:]) / 200 <= 1.2 * most_ms
