"""The chunk of a prompt follows the measured time of steps."""

import pytest
from support.engine_driver import Stream, drain, greedy_oracle, request
from support.fake_runner import FakeRunner

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.pacing import BULK_STEP_MS, LEAST_CHUNK
from tokenmill.workers.engine.request import EngineRequest


class TimedRunner(FakeRunner):
    """A step takes 10 ms, 1 ms a row, and 1 ms for each 400 keys attended to."""

    now = 0.0
    mixed_ms = 0.0
    """What a step with prompt tokens takes more, however few they are."""

    def run(self, batch):
        keys = sum(
            part.query_length * (part.context_length - (part.query_length - 1) / 2)
            for part in batch.slices
        )
        if any(part.query_length > 1 for part in batch.slices):
            self.now += self.mixed_ms / 1e3
        self.now += (10.0 + len(batch.token_ids) + keys / 400.0) / 1e3
        return super().run(batch)


def run(
    job_class=JobClass.INTERACTIVE,
    prompt: int = 250,
    rows: int = 8,
    mixed_ms: float = 0.0,
    **options,
):
    """Step times in ms: of decode alone, then with a prompt beside the rows."""
    runner = TimedRunner(num_blocks=2000, max_context=1000)
    runner.mixed_ms = mixed_ms
    engine = Engine(
        runner,
        TokenTable.for_bytes(),
        max_running=rows + 1,
        clock=lambda: runner.now,
        **options,
    )

    stream = Stream()

    def step_ms() -> float:
        began = runner.now
        stream.take(engine.step())
        return (runner.now - began) * 1e3

    for i in range(rows):
        base = request(f"r{i}", [i, 1, 2], max_tokens=400, ignore_eos=True)
        engine.add(
            EngineRequest(
                id=base.id,
                token_ids=base.token_ids,
                sampling=base.sampling,
                seed=1,
                job_class=job_class,
            )
        )
    step_ms()
    # A first prompt tells what prompt tokens cost.
    engine.add(request("first", [90, *range(60)], max_tokens=1))
    while engine.capacity().prefill_backlog:
        step_ms()
    quiet = [step_ms() for _ in range(20)]
    long_prompt = [i % 90 for i in range(prompt)]
    engine.add(request("long", long_prompt, max_tokens=2, ignore_eos=True))
    busy = []
    while engine.capacity().prefill_backlog:
        busy.append(step_ms())
    step_ms()  # where the last chunk of the prompt is one token, it comes now
    assert stream.token_ids["long", 0][:1] == greedy_oracle(long_prompt, 1, eos=None)
    return quiet, busy, runner


def test_steps_with_a_prompt_take_at_most_twice_those_without():
    quiet, busy, _ = run()
    assert max(busy) <= 2.0 * max(quiet)
    # Most of the room is used, at the prompt's beginning and at its far end.
    assert min(busy[5:-1]) >= 1.3 * max(quiet)


def test_a_target_of_its_own_is_kept():
    _, busy, _ = run(step_target_ms=80.0)
    assert max(busy[1:]) <= 80.0
    assert max(busy) >= 55.0


def test_bulk_alone_and_no_target_are_not_bounded():
    for options in ({"job_class": JobClass.BULK}, {"step_target_ms": 0.0}):
        _, busy, _ = run(**options)
        assert len(busy) == 1


def test_bulk_prompts_run_in_steps_that_nobody_waits_long_for():
    """And an interactive prompt that comes shares its step with few of them."""
    runner = TimedRunner(num_blocks=4000, max_context=2000)
    engine = Engine(runner, TokenTable.for_bytes(), clock=lambda: runner.now)
    took: list[float] = []

    def step() -> None:
        began = runner.now
        engine.step()
        took.append((runner.now - began) * 1e3)

    for name in range(6):
        base = request(f"b{name}", [name] * 300, max_tokens=2)
        bulk = {n: getattr(base, n) for n in base.__struct_fields__}
        engine.add(EngineRequest(**{**bulk, "job_class": JobClass.BULK}))
    for _ in range(6):
        step()
    assert max(took[2:]) <= 1.2 * BULK_STEP_MS
    assert min(took[2:]) >= 0.4 * BULK_STEP_MS
    engine.add(request("i", [9] * 200, max_tokens=1))
    before = len(runner.batches)
    step()
    (asked,) = [len(batch.token_ids) for batch in runner.batches[before:]]
    assert 200 <= asked <= 230
    while engine.has_work:
        step()


def test_a_prompt_by_itself_runs_in_whole_chunks():
    runner = TimedRunner(num_blocks=2000, max_context=1000)
    engine = Engine(runner, TokenTable.for_bytes(), clock=lambda: runner.now)
    for name in ("a", "b"):
        engine.add(request(name, [i % 90 for i in range(700)], max_tokens=1))
        drain(engine)
    assert [len(batch.token_ids) for batch in runner.batches][:2] == [512, 188]


def test_prefill_moves_even_where_no_time_is_left():
    _, busy, runner = run(prompt=60, step_target_ms=0.001)
    chunks = [len(batch.token_ids) - 8 for batch in runner.batches]
    # The first decides by nothing, and one of sixteen tries a larger one.
    assert 20 <= len(busy) <= 60 // LEAST_CHUNK
    assert LEAST_CHUNK in chunks


@pytest.mark.parametrize("rows", [1, 16])
def test_the_bound_holds_for_few_and_for_many_rows(rows):
    quiet, busy, _ = run(rows=rows, prompt=200)
    assert max(busy) <= 2.0 * max(quiet)


@pytest.mark.parametrize(("mixed_ms", "steps"), [(5.0, 70), (40.0, 15)])
def test_a_fixed_cost_of_steps_with_a_prompt_does_not_shrink_chunks(mixed_ms, steps):
    quiet, busy, _ = run(mixed_ms=mixed_ms)
    assert len(busy) <= steps
    assert max(busy) <= (2.0 if mixed_ms == 5.0 else 6.0) * max(quiet)
