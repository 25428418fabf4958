"""bench/mixed_models.py: what it makes of its figures, and one run of itself."""

import json
import subprocess
import sys

from support.bench_modules import BENCH, bench_module
from support.pools import clean_environment

mixed_models = bench_module("mixed_models")
mixed_load = bench_module("mixed_load")


def figures(queue: float, rate: float = 10.0, failed: float = 0.0):
    return {
        "failed": failed,
        "output_tokens_per_s": rate,
        "queue_ms_p99": queue,
        "ttft_ms_p99": queue + 20,
        "total_ms_p99": queue + 200,
        "send_lag_ms_p99": 1.0,
    }


def steps(first: float, second: float):
    return {
        "whole host model-1": figures(0, 20.0),
        "alone, full model-1": figures(0, 12.0),
        "together, full model-1": figures(0, 9.0),
        "together, full model-2": figures(0, 9.0),
        "alone model-1": figures(10),
        "alone model-2": figures(10),
        "together model-1": figures(10 + first),
        "together model-2": figures(10 + second),
    }


def test_the_model_that_feels_more_counts():
    extra = mixed_models.added(steps(5, 40))
    assert extra == {"queue_ms_p99": 40, "ttft_ms_p99": 40, "total_ms_p99": 40}
    assert mixed_models.problems_of(steps(5, 40), extra) == []
    late = mixed_models.added(steps(60, 40))
    (problem,) = mixed_models.problems_of(steps(60, 40), late)
    assert problem.startswith("a neighbour adds 60 ms")


def test_failures_and_a_late_generator_are_problems():
    found = steps(0, 0)
    found["alone model-1"]["failed"] = 2.0
    found["together model-2"]["send_lag_ms_p99"] = 90.0
    problems = mixed_models.problems_of(found, mixed_models.added(steps(0, 0)))
    assert [text.partition(":")[0] for text in problems] == [
        "alone model-1",
        "together model-2",
    ]


def test_throughput_is_of_both_against_one():
    rate = mixed_models.throughput(steps(0, 0))
    assert rate["together_tokens_per_s"] == 18.0
    assert rate["together_over_whole_host"] == 0.9
    assert rate["together_over_alone"] == 1.5


def test_rounds_are_averaged_and_a_failure_in_one_stays():
    joined = mixed_load.joined([figures(10), figures(20, failed=3.0)])
    assert joined["queue_ms_p99"] == 15
    assert joined["failed"] == 3.0


def test_a_short_run_ends_with_one_line_of_figures():
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / "mixed_models.py"), "--engine", "echo:2"),
            *("--duration", "1", "--rounds", "1", "--users", "4"),
            *("--load", "0.1", "--limit-tokens", "8"),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "mixed_models"
    assert not any("failed" in problem for problem in report["problems"])
    assert set(report["added_ms"]) == {"queue_ms_p99", "ttft_ms_p99", "total_ms_p99"}
    assert report["steps"]["together model-2"]["requests"] > 0
