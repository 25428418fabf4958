"""bench/load.py: arrivals, what latency counts from, figures and the report."""

import asyncio
import itertools
import math
import statistics
import time
from types import SimpleNamespace

import pytest
from support.bench_modules import bench_module
from support.waiting import Delay, nap

load_plan = bench_module("load_plan")
load_drive = bench_module("load_drive")
load_measure = bench_module("load_measure")
load_report = bench_module("load_report")
load_sides = bench_module("load_sides")
load = bench_module("load")

Request, Step, Sample = load_plan.Request, load_plan.Step, load_measure.Sample
REQUESTS = (Request("a b", 2), Request("c d", 2))


def endless():
    return itertools.cycle(REQUESTS)


class Slow:
    """A server that answers one request at a time."""

    name = "slow"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._one = asyncio.Lock()
        self.now = self.most = self.answered = 0

    async def send(self, request, sample):
        self.now += 1
        self.most = max(self.most, self.now)
        async with self._one:
            await nap(self._seconds)
        sample.pieces = [time.monotonic()]
        sample.tokens, sample.words = 1, 2
        sample.end = time.monotonic()
        self.now -= 1
        self.answered += 1


def sample(*, ttft=0.1, per_token=0.01, tokens=11, words=10, error=None, at=0.0):
    first = at + ttft
    pieces = [first + per_token * n for n in range(tokens)]
    return Sample(
        intended=at,
        sent=at + 0.002,
        pieces=pieces,
        end=pieces[-1],
        tokens=tokens,
        words=words,
        error=error,
    )


def test_arrivals_are_a_poisson_process_of_the_rate_and_repeatable():
    times = load_plan.poisson_times(50, 200, seed=3)
    assert times == load_plan.poisson_times(50, 200, seed=3)
    assert times != load_plan.poisson_times(50, 200, seed=4)
    assert times == sorted(times)
    assert times[-1] < 200
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # Of exponential gaps the deviation is the mean, and e^-1 are longer than it.
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    longer = sum(gap > 1 / 50 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(math.exp(-1), abs=0.03)


async def test_an_open_loop_does_not_wait_and_counts_the_waits_of_a_slow_server():
    side = Slow(0.03)
    step = Step("open", 200)
    async with Delay() as delay:
        samples = await load_drive.drive(side, step, endless(), 0.1, seed=1)
    assert len(samples) > 5
    assert side.most > 3  # sent although earlier ones were not answered
    totals = sorted(s.total_s for s in samples)
    # The last stood in line behind all others: it has waited about as long as they
    # took, which a generator that waits for answers would never have seen.
    assert totals[-1] > 0.03 * len(samples) * 0.5
    assert max(s.sent - s.intended for s in samples) < 0.1 + delay.allowance_s


async def test_a_closed_loop_has_so_many_users_and_no_more(monkeypatch):
    side = Slow(0.005)
    # Time goes by with the answers, of which a slow machine gives as many.
    clock = SimpleNamespace(monotonic=lambda: 0.01 * side.answered)
    monkeypatch.setattr(load_drive, "time", clock)
    samples = await load_drive.drive(side, Step("closed", 3), endless(), 0.3, seed=1)
    assert side.most == 3
    assert 30 <= len(samples) <= 30 + 2


def test_figures_of_known_samples():
    samples = [
        sample(ttft=0.1, at=0.0),
        sample(ttft=0.2, at=1.0),
        sample(ttft=0.9, at=2.0, per_token=0.2),
    ]
    found = load_measure.figures(samples, load_measure.Objective(500, 50))
    assert found["requests"] == 3
    assert found["failed"] == 0
    assert found["ttft_ms_p50"] == pytest.approx(200, abs=0.1)
    assert found["ttft_ms_p99"] == pytest.approx(900, abs=0.1)
    assert found["per_token_ms_p50"] == pytest.approx(10, abs=0.1)
    assert found["gap_ms_p99"] == pytest.approx(200, abs=0.1)
    assert found["good_percent"] == pytest.approx(66.7)
    seconds = 2.0 + 0.9 + 10 * 0.2
    assert found["seconds"] == pytest.approx(seconds, abs=0.01)
    assert found["qps"] == pytest.approx(3 / seconds, abs=0.001)
    assert found["goodput_qps"] == pytest.approx(2 / seconds, abs=0.001)
    assert found["send_lag_ms_p99"] == pytest.approx(2, abs=0.1)


def test_rates_of_a_closed_loop_leave_its_beginning_and_its_end_out():
    # Of 8 s the first 2 and what ends later do not count.
    samples = [sample(ttft=end - 0.1, at=0.0) for end in (1.0, 3.0, 7.5, 20.0)]
    goal = load_measure.Objective(5000, 50)
    found = load_measure.figures(samples, goal, closed_s=8.0)
    assert found["qps"] == pytest.approx(2 / 6, abs=0.001)
    assert found["goodput_qps"] == pytest.approx(1 / 6, abs=0.001)
    assert found["output_tokens_per_s"] == pytest.approx(22 / 6, abs=0.1)
    assert found["requests"] == 4
    assert found["ttft_ms_p99"] == pytest.approx(19_900, abs=1)
    none = load_measure.figures(samples[:1], goal, closed_s=8.0)
    row = {"side": "client", "mode": "closed", "level": 1.0, "figures": none}
    assert "no request ended in the part" in load.problems_of([row])[0]


def test_the_real_time_factor_is_time_to_answer_over_time_to_read():
    one = sample(ttft=0.0, per_token=0.5, tokens=11, words=20)  # 5 s
    assert one.real_time_factor(240) == pytest.approx(1.0)  # 20 words: 5 s
    assert one.real_time_factor(120) == pytest.approx(0.5)


def test_failed_requests_count_against_goodput_and_are_a_problem():
    samples = [sample(), sample(error="queue_full")]
    found = load_measure.figures(samples, load_measure.Objective(500, 50))
    assert (found["failed"], found["good_percent"]) == (1, 50.0)
    row = {"side": "client", "mode": "open", "level": 1.0, "figures": found}
    assert load.problems_of([row]) == ["open 1, client: 1 requests failed"]
    late = {**found, "failed": 0, "send_lag_ms_p99": 80.0}
    assert "80 ms late" in load.problems_of([{**row, "figures": late}])[0]
    with pytest.raises(SystemExit, match="no request"):
        load_measure.figures([sample(error="x")], load_measure.Objective(1, 1))


def test_what_came_in_one_piece_has_no_time_of_a_token(tmp_path):
    whole = Sample(intended=0.0, pieces=[0.1], end=0.1, tokens=9, words=4)
    found = load_measure.figures([whole, whole], load_measure.Objective(500, 50))
    assert not [name for name in found if name.startswith(("per_token", "gap"))]
    assert found["good_percent"] == 100.0
    row = {"side": "client", "mode": "open", "level": 1.0, "batch_size": None}
    rows = [{**row, "figures": found, "memory_mib": {}}]
    path = tmp_path / "load.md"
    load_report.write_report(path, rows, {}, ["open 1, client: 80 ms late"])
    text = path.read_text("utf-8")
    assert "| 100 / 100 / 100 | - | - | 100 / 100 / 100 |" in text
    assert "Time of a token: not measured." in text
    assert "## Problems\n\n- open 1, client: 80 ms late\n" in text
    names = {image.name for image in tmp_path.glob("*.svg")}
    assert names == {"load-open-ttft.svg", "load-open-rate.svg"}


def test_an_event_stream_becomes_pieces_tokens_and_errors():
    got = Sample(intended=0.0)
    note = load_sides._note
    assert note(": keep-alive", got) == 0
    assert note('data: {"choices": [{"text": "to and fro "}]}', got) == 3
    assert note('data: {"choices": [], "usage": {"completion_tokens": 7}}', got) == 0
    assert note("data: [DONE]", got) == 0
    assert (len(got.pieces), got.tokens, got.error) == (1, 7, None)
    note('data: {"error": {"type": "server_error", "code": null}}', got)
    assert got.error == "server_error"


async def test_both_ways_in_have_their_first_text_at_the_same_token():
    """The first token of a word may be half a character: nothing to read yet."""
    deltas = [("", 1), ("to ", 1), ("", 1), ("fro", 2)]

    class Job:
        async def stream(self):
            for text, tokens in deltas:
                yield SimpleNamespace(text=text, token_ids=[0] * tokens)

    class Mill:
        async def submit(self, prompt):
            return Job()

    side = load_sides.ClientSide("redis://127.0.0.1:1/0", "m")
    side._mill = Mill()
    client, gateway = Sample(intended=0.0), Sample(intended=0.0)
    await side.send(Request("x", 5), client)
    for text, _ in deltas:
        load_sides._note(f'data: {{"choices": [{{"text": "{text}"}}]}}', gateway)
    assert len(client.pieces) == len(gateway.pieces) == 2
    assert (client.tokens, client.words) == (5, 2)


def test_arrivals_of_a_known_number_have_exponential_gaps():
    times = load_plan.arrivals(10_000, 200.0, seed="3-m")
    assert times == load_plan.arrivals(10_000, 200.0, seed="3-m")
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 200
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)


def test_no_two_requests_of_a_run_begin_alike():
    first = itertools.islice(load_plan.distinct(endless(), "a"), 4)
    second = itertools.islice(load_plan.distinct(endless(), "b"), 4)
    prompts = [one.prompt for one in (*first, *second)]
    assert len({prompt.split()[0] for prompt in prompts}) == 8
    assert prompts[0] == "(a-0) a b"


def test_steps_go_from_light_to_heavy_and_the_workload_is_read():
    names = [step.name for step in load_plan.steps([4, 1.5], [8, 2])]
    assert names == ["open 1.5/s", "open 4/s", "closed 2", "closed 8"]
    requests = load_plan.read_workload(load_plan.WORKLOAD, limit_tokens=5)
    assert len(requests) == 64
    assert max(r.max_tokens for r in requests) == 5
    first = [r.prompt for r in itertools.islice(load_plan.shuffled(requests, 1), 9)]
    again = [r.prompt for r in itertools.islice(load_plan.shuffled(requests, 1), 9)]
    assert first == again


def test_the_report_has_a_row_a_step_and_its_plots(tmp_path):
    found = load_measure.figures([sample(), sample()], load_measure.Objective(500, 50))
    rows = [
        {
            "side": side,
            "mode": mode,
            "level": level,
            "batch_size": 8,
            "figures": found,
            "memory_mib": {"worker": 300.0, "redis": 12.0},
        }
        for mode, level in (("open", 1.0), ("open", 2.0), ("closed", 4.0))
        for side in ("client", "gateway")
    ]
    path = tmp_path / "out" / "load.md"
    load_report.write_report(path, rows, {"engine": "echo"})
    text = path.read_text("utf-8")
    assert text.count("| client |") == 3
    assert "| open 1, gateway | 12 | 300 |" in text
    images = {p.name for p in path.parent.glob("*.svg")}
    assert images == {
        f"load-{mode}-{kind}.svg"
        for mode in ("open", "closed")
        for kind in ("ttft", "per_token", "rate")
    }
    assert all(f"]({name})" in text for name in images)
