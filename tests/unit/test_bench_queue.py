"""What the queue's benchmarks make of what they measured."""

import sys

import pytest
from support.bench_modules import BENCH, bench_module

verdict = bench_module("soak_verdict")
subscribers = bench_module("subscribers")
soak = bench_module("soak")
scale = bench_module("scale_verdict")
report = bench_module("report")
queue = bench_module("queue_verdict")


@pytest.mark.parametrize("rise", [0.0, 10.0, 60.0])
def test_a_steady_rise_is_growth(rise):
    values = [100.0 + rise * n / 29 for n in range(30)]

    growth = verdict.growth_percent(values)

    # From the middle of the first third to that of the last: two thirds of the rise.
    assert growth == pytest.approx(rise * 20 / 29, rel=0.1, abs=0.01)


def test_ups_and_downs_and_one_peak_are_no_growth():
    saw = [100.0 + 8 * (n % 5) for n in range(60)]
    saw[-1] = 900.0

    assert abs(verdict.growth_percent(saw)) < verdict.GROWTH_PERCENT


def test_too_few_samples_say_nothing():
    with pytest.raises(SystemExit, match="say nothing"):
        verdict.growth_percent([1.0, 2.0])


def test_a_process_that_grows_after_the_warm_up_is_told_of_by_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["soak.py", "--warm-up", "50"])
    options = soak.arguments()
    # The rise within the warm-up does not count.
    flat = [float(n) for n in range(10)] + [100.0] * 30
    leak = [100.0] * 10 + [100.0 + n for n in range(30)]

    memory, problems = soak.judge({"flat_rss": flat, "leak_rss": leak}, options)

    assert memory["flat_rss"]["growth_percent"] == 0.0
    assert [problem.split()[0] for problem in problems] == ["leak_rss"]


@pytest.mark.parametrize(
    ("not_sent", "per_s", "problems"),
    [(0, 100, 0), (0, 96, 0), (0, 94, 1), (3, 100, 1), (3, 50, 2)],
)
def test_a_soak_without_its_load_is_no_soak(not_sent, per_s, problems):
    assert len(verdict.load_problems(not_sent, per_s, 100)) == problems


def test_a_token_is_as_late_as_its_own_step():
    made = {"job": [1.0, 2.0, 3.0]}
    seen = [("job", [1.1, 3.05, 3.05]), ("job", [1.2, 2.2, 3.2])]

    delays, problems = subscribers.delays_ms(made, seen, 3)

    # The second token waited for the third: it is late, though its delta was not.
    assert delays == pytest.approx([100, 1050, 50, 200, 200, 200])
    assert not problems


def test_a_subscriber_that_missed_a_token_is_a_problem():
    _, problems = subscribers.delays_ms({"job": [1.0, 2.0]}, [("job", [1.1])], 2)

    assert problems == ["job: 1 tokens of 2"]


def level(**changes: float) -> dict[str, float]:
    same = {
        "dispatched_per_s": 1000,
        "scheduler_us_per_job": 100,
        "redis_us_per_job": 90,
        "plan_us_per_job": 20,
        "step_p50_ms": 4.0,
        "read_p50_ms": 2.0,
        "scheduler_rss_mib": 50,
        "enqueue_first_per_s": 10_000,
        "enqueue_last_per_s": 9_900,
    }
    return same | changes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dispatched_per_s", 700), ("scheduler_us_per_job", 130)),
        *(("plan_us_per_job", 30), ("step_p50_ms", 9.0), ("read_p50_ms", 3.1)),
        *(("redis_us_per_job", 120), ("scheduler_rss_mib", 0)),
    ],
)
def test_what_a_million_jobs_make_slower_is_told_of(name, value):
    _, problems = scale.changed({"1000": level(), "1000000": level(**{name: value})})

    assert [problem.split(":")[0] for problem in problems] == [name]


def test_a_fill_that_slows_down_is_told_of():
    slower = level(enqueue_last_per_s=7_000)

    _, (problem,) = scale.changed({"1000": level(), "1000000": slower})

    assert problem.startswith("enqueue_per_s: 10000.0 with few")


def test_what_was_not_measured_is_told_of():
    without = level()
    del without["read_p50_ms"]

    _, (problem,) = scale.changed({"1000": level(), "1000000": without})

    assert problem == "read_p50_ms was not measured"


def test_what_a_million_jobs_make_no_slower_is_not():
    better = level(dispatched_per_s=1500, scheduler_us_per_job=90)

    assert scale.changed({"1000": level(), "1000000": better})[1] == []


def queue_report(**changes: object) -> dict[str, object]:
    good = {
        "jobs_per_s": 2500,
        "p99_ms": 13.0,
        "comparisons": {"arq": {"ratio": 6.0}},
        "not_installed": {},
        "not_completed": {},
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"jobs_per_s": 1900}, "jobs_per_s is 1900"),
        ({"p99_ms": 16.0}, "p99_ms is 16.0"),
        ({"comparisons": {"arq": {"ratio": 2.0}}}, "2.0 times arq"),
    ],
)
def test_a_missed_target_is_told_of(changes, problem):
    assert queue.missed(queue_report()) == []
    (found,) = queue.missed(queue_report(**changes))
    assert found.startswith(problem)


def test_a_latency_that_was_not_measured_is_no_good_latency():
    report = queue_report()
    del report["p99_ms"]

    assert queue.missed(report)[0].startswith("p99_ms was not measured")


def test_a_peer_that_did_not_run_and_wrong_results_are_problems():
    right = {"tokenmill": [{"wrong": 0}], "arq": [{"wrong": 0}, {"wrong": 0}]}
    wrong = {"tokenmill": [{"wrong": 0}, {"wrong": 2}], "arq": [{"wrong": 1}]}
    report = queue_report(not_installed={"streaq": "no module"})

    assert queue.invalid(queue_report(), right) == []
    assert queue.invalid(report, right) == [
        "streaq was named and did not run (not installed): no module"
    ]
    assert len(queue.invalid(queue_report(), wrong)) == 2


QUEUE = {
    "sides": {
        "tokenmill": [
            {
                "jobs_per_s": n,
                "cpu_us_per_job_in_all": 700,
                "cpu_us_per_job": {"redis": 9},
            }
            for n in (2000, 2500)
        ],
        "arq": [
            {"jobs_per_s": 400, "cpu_us_per_job_in_all": 3900, "cpu_us_per_job": {}}
        ],
    },
    "comparisons": {
        "arq": {"ratio": 6.25, "ratio_of_processed": 5.5, "cpu_ratio": 5.57}
    },
    "not_installed": {"streaq": "No module named 'streaq'"},
    "targets": {"ratio": 3.0},
    "p50_ms": 6.7,
    "p99_ms": 13.7,
}
DELAYS = {
    "deliveries": 40000,
    "p50_ms": 75.1,
    "p99_ms": 132.2,
    "max_ms": 146.6,
    "connections_of_subscribers": 20,
    "clients_rss_mib": 171.6,
}
SUBSCRIBERS = {
    "subscribers": 1000,
    "jobs": 500,
    "processes": 4,
    "step_ms": 500,
    "target_p99_ms": 250.0,
    "tokenmill": DELAYS,
    "plain_pubsub": DELAYS,
}
TAKEOVER = {"waiting": 999_000, "leads_after_s": 2.01, "dispatches_after_s": 2.31}
SCALE = {"levels": {"1000": level(), "1000000": level() | {"takeover": TAKEOVER}}}
SOAK = {
    "minutes": 30.0,
    "load": 0.5,
    "capacity_jobs_per_s": 800,
    "retention": 60.0,
    "memory_mib": {
        "redis_rss": {"first": 21.5, "last": 22.0, "most": 23.0, "growth_percent": 1.2}
    },
}


def test_the_page_has_the_queues_figures():
    page = report.page(
        {"queue": QUEUE, "subscribers": SUBSCRIBERS, "scale": SCALE, "soak": SOAK}
    )

    assert "| tokenmill | 2,500 | 700 |" in page
    assert "| arq | 400 | 3,900 | 6.25 | 5.50 | 5.57 | yes |" in page
    assert "streaq: No module named" in page
    assert "| tokenmill | 40,000 | 75.1 | 132 | 147 | 20 | 172 |" in page
    assert "| jobs dispatched/s | 1,000 | 1,000 |" in page
    assert "led 2.01 s after" in page
    assert "| redis rss | 21.5 | 22.0 | 23.0 | 1.20 |" in page


@pytest.mark.parametrize("name", ["queue", "subscribers", "scale", "soak"])
def test_each_is_described_where_a_reader_looks(name):
    readme = (BENCH / "README.md").read_text(encoding="utf-8")

    assert f"## {name}.py" in readme
    assert f"python bench/{name}.py" in readme
