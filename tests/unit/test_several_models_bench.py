"""bench/mixed_models.py and switches.py: what they make of figures, and a run each."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.bench_modules import BENCH, bench_module
from support.pools import clean_environment

mixed_models = bench_module("mixed_models")
model_load = bench_module("model_load")
switches_check = bench_module("switches_check")
Sample = bench_module("load_measure").Sample


def figures(queue: float, failed: float = 0.0, load: float = 0.6):
    times = {"queue_ms": queue, "ttft_ms": queue + 20, "total_ms": queue + 200}
    return {
        **{f"{name}_{p}": ms for name, ms in times.items() for p in PARTS},
        "failed": failed,
        "load": load,
        "send_lag_ms_p99": 1.0,
    }


PARTS = ("p50", "p95", "p99")
FULL = {
    f"{name}": {"output_tokens_per_s": rate, "failed": 0}
    for name, rate in (
        ("whole host model-1", 20.0),
        ("alone, full model-1", 12.0),
        ("alone, full model-2", 12.0),
        ("together, full model-1", 9.0),
        ("together, full model-2", 9.0),
    )
}


def steps(first: float, second: float):
    return {
        "alone model-1": figures(10),
        "alone model-2": figures(10),
        "together model-1": figures(10 + first),
        "together model-2": figures(10 + second),
    }


def judged(found):
    extra = mixed_models.added(found)
    return mixed_models.problems_of(FULL, found, extra, 0.6)


def test_the_model_that_feels_more_counts():
    extra = mixed_models.added(steps(5, 40))
    assert extra["queue_ms_p99"] == extra["total_ms_p50"] == 40
    assert judged(steps(5, 40)) == ("met", [])
    verdict, (problem,) = judged(steps(60, 40))
    assert verdict == "missed"
    assert problem.startswith("a neighbour adds 60 ms")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("failed", 2.0, "2 requests failed"),
        ("send_lag_ms_p99", 90.0, "90 ms late"),
        ("load", 0.54, "the load reached 54% of what"),
    ],
)
def test_a_run_that_was_not_as_it_should_be_is_not_judged(field, value, says):
    found = steps(0, 0)
    found["alone model-1"][field] = value
    verdict, (problem,) = judged(found)
    assert verdict == "not judged"
    assert problem.startswith("alone model-1: ")
    assert says in problem


def test_throughput_is_of_both_against_each_alone():
    rate = mixed_models.throughput(FULL)
    assert rate["together_tokens_per_s"] == 18.0
    assert rate["together_over_whole_host"] == 0.9
    assert rate["together_over_alone"] == 0.75


def window(*ends: float, begin: float = 100.0, versions=("v1",)):
    samples = [
        Sample(
            intended=end - 1.0,
            sent=end - 1.0,
            pieces=[end],
            end=end,
            tokens=4,
            queued_ms=5.0,
            version=versions[n % len(versions)],
        )
        for n, end in enumerate(ends)
    ]
    return model_load.Window(begin, 10.0, samples)


def test_the_load_that_was_reached_is_what_was_served_and_not_what_was_sent():
    # The last of the first window took far longer than usual.
    found = model_load.figures_of([window(101, 109, 150), window(104, 110.5)], 0.5)
    assert (found["requests"], found["offered_qps"]) == (5, 0.25)
    assert (found["served_qps"], found["load"]) == (0.2, 0.4)
    assert found["queue_ms_p99"] == 5.0
    assert found["total_ms_p50"] == 1000.0


def test_a_saturated_model_is_counted_while_all_users_wait():
    rates = model_load._rates("m", window(99, 101, 105, 111))
    assert rates == {"qps": 0.2, "output_tokens_per_s": 0.8, "failed": 0}
    with pytest.raises(SystemExit, match="m: no request ended in the 10 s"):
        model_load._rates("m", window(99, 111))


def info(job: str = "a", **fields: object):
    kept = {"state": "succeeded", "attempts": 0, "lease_losses": 0}
    return SimpleNamespace(id=job, **{**kept, **fields})


def test_every_job_is_one_that_succeeded_at_once():
    assert switches_check.lost(2, [info("a"), info("b")], 0) == []
    assert "1 jobs taken" in switches_check.lost(2, [info("a")], 0)[0]
    assert "1 failed attempts" in switches_check.lost(1, [info(attempts=1)], 0)[0]
    assert "job a: failed" in switches_check.lost(1, [info(state="failed")], 0)[0]
    assert switches_check.lost(1, [info()], 3) == ["3 dead letters"]


def test_jobs_name_a_version_that_may_have_served_them():
    both = window(101, 102, versions=("v1", "v2"))
    good = {"one version": [window(101)], "both": [both], "switching": [both]}
    assert switches_check.wrongly_served(good) == []
    (problem,) = switches_check.wrongly_served({**good, "one version": [both]})
    assert problem == "one version, round 1: jobs served by v2"
    (problem,) = switches_check.wrongly_served({**good, "switching": [window(101)]})
    assert problem == "switching: v2 served no job"


def test_switches_are_judged_by_the_whole_time_and_only_if_there_were_enough():
    def judge(moved: float, made: int, wrong=()):
        calm = figures(0)
        kinds = {"one version": calm, "both": calm, "switching": figures(moved)}
        return switches_check.verdict_of(kinds, 0.6, [made], wrong)

    assert judge(100, 5) == ("met", [])
    verdict, (problem,) = judge(101, 5)
    assert verdict == "missed"
    assert problem.startswith("P99 with switches is 1.50 times that without")
    assert judge(0, 4)[0] == "not judged"
    assert judge(0, 5, ["a job failed"]) == ("missed", ["a job failed"])


def last_line(script: str, *options: str):
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / script), "--rounds", "1"),
            *("--users", "4", "--warm-up", "0.3", *options),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_short_run_of_two_models_ends_with_one_line_of_figures():
    report = last_line(
        "mixed_models.py",
        *("--engine", "echo:2", "--limit-tokens", "4", "--requests", "10"),
        *("--window", "1.5", "--load", "0.5"),
    )
    assert report["benchmark"] == "mixed_models"
    assert not any("failed" in problem for problem in report["problems"])
    assert report["added_ms"].keys() >= {"queue_ms_p99", "ttft_ms_p99", "total_ms_p99"}
    assert report["steps"]["together model-2"]["requests"] >= 10


def test_a_short_run_of_switches_loses_no_job():
    report = last_line(
        "switches.py",
        *("--engine", "echo:20", "--limit-tokens", "8", "--requests", "12"),
        *("--window", "2", "--load", "0.3", "--every", "0.2"),
    )
    timing = ("ms late", "load reached", "times that", "in a window", "served no job")
    problems = report["problems"]
    assert not [one for one in problems if not any(word in one for word in timing)]
    assert report["jobs"] == 36
    assert set(report["served_by"]["one version"]) == {"v1"}
    assert report["switches"] > 0
