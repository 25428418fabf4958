"""The page of benchmark figures is made from saved results alone."""

import json

import pytest
from support.bench_modules import bench_module

harness = bench_module("harness")
report = bench_module("report")

HOST = {
    "date": "2026-01-02",
    "processor": "x86_64, Some CPU, avx2",
    "cores": 2,
    "load_average_at_start": 0.1,
}
ENGINE = {
    "benchmark": "engine",
    "machine": HOST,
    "workload": "mixed.jsonl",
    "requests": 64,
    "prompt_tokens": 8340,
    "output_tokens": 4365,
    "weights": "int8",
    "kv": "int8",
    "job_class": "bulk",
    "mixed": {
        "tokenmill": [{"output_tokens_per_s": 201.5, "seconds": 21.0}],
        "llama.cpp": [{"output_tokens_per_s": 73.25, "seconds": 60.0}],
    },
    "rates": {
        name: [{"decode_1": 1.0, "decode_8": 2.0, "decode_16": 3.0, "prefill": 4.0}]
        for name in ("tokenmill", "llama.cpp")
    },
    "comparisons": [
        {
            "what": "mixed workload",
            "against": "llama.cpp",
            "ours": 201.5,
            "theirs": 73.25,
            "ratio": 2.75,
            "target": 2.0,
            "tries": 1,
        }
    ],
    "not_installed": {"vllm": "not installed: see bench/peers/README.md"},
    "problems": [],
}
QUALITY = {
    "bench": "quality",
    "tokens": 100000,
    "problems": [],
    "precisions": [
        {"weights": "int8", "change": 0.11},
        {"weights": "nf4", "kv": "int4"},
    ],
}


def test_every_figure_is_on_the_page():
    page = report.page({"engine": ENGINE})
    assert "| mixed workload | llama.cpp | 202 | 73.2 | 2.75 | 2.00 | yes |" in page
    assert "vllm: not installed: see bench/peers/README.md." in page
    assert "2026-01-02" in page
    assert "busy" not in page


def test_a_busy_machine_is_said():
    busy = ENGINE | {"machine": HOST | {"load_average_at_start": 3.5}}
    assert "3.5 (busy" in report.page({"engine": busy})


def test_results_without_a_section_become_tables():
    page = report.page({"quality": QUALITY})
    assert "## Quality" in page
    assert "| tokens | 100,000 |" in page
    assert "| weights | change | kv |" in page
    assert "| nf4 | - | int4 |" in page


STEP = {
    "requests": 150,
    "load": 0.593,
    "queue_ms_p50": 8.0,
    **{f"{what}_ms_p99": 41.5 for what in ("queue", "ttft", "total")},
    **{f"total_ms_{part}": 300.0 for part in ("p50", "p95")},
}
LIMITS = {"limit_prompt": 256, "limit_tokens": 16, "load": 0.6, "rounds": 3}
TWO_MODELS = {
    **LIMITS,
    "model": "small",
    "share": 0.5,
    "full": {"together, full model-1": {"qps": 2.5, "output_tokens_per_s": 40.0}},
    "steps": {"alone model-1": STEP},
    "added_ms": {f"{what}_ms_p99": 3.0 for what in ("queue", "ttft", "total")},
    "target_ms": 50.0,
    "verdict": "met",
    "throughput": {"together_over_alone": 0.9, "together_over_whole_host": 1.02},
}
SWITCHES = {
    **LIMITS,
    "model": "small",
    "every": 3.0,
    "jobs": 450,
    "switches": 21,
    "steps": {"switching": STEP},
    "served_by": {"one version": {"v1": 150}, "switching": {"v1": 70, "v2": 80}},
    "ratios": {"p99": 1.12, "p99_to_both": 1.01},
    "target_ratio": 1.5,
    "verdict": "met",
    "problems": [],
}


def test_models_and_versions_have_sections_that_say_the_verdict():
    page = report.page({"mixed_models": TWO_MODELS, "switches": SWITCHES})
    row = "150 | 0.59 | 8.00 | 41.5 | 41.5 | 300 | 300 | 41.5 |"
    assert f"| alone model-1 | {row}" in page
    assert "A neighbour adds 3 ms to P99 of the wait in the queue" in page
    assert "(target: at most 50; met)" in page
    assert "| together, full model-1 | 2.50 | 40.0 |" in page
    assert "is 1.12 times that on one version (target: at most 1.5; met)" in page
    assert "Of 450 jobs each succeeded once." in page
    assert "| one version | 150 | 0 |" in page
    hurt = SWITCHES | {"problems": ["a job failed: lost", "P99 is late"]}
    assert "Of 450 jobs 1 problems: a job failed: lost." in report.page(
        {"switches": hurt}
    )


def test_levels_with_a_route_stand_beside_those_without():
    level = {"dispatched_per_s": 2190}
    took = {"waiting": 9, "leads_after_s": 2.0, "dispatches_after_s": 2.1}
    plain = {"levels": {"1000": level | {"takeover": took}}}
    assert "|  | 1,000 waiting |\n" in report.page({"scale": plain})
    routed = {"routed": {"dispatched_per_s": 2100}, "takeover": took}
    page = report.page({"scale": {"levels": {"1000": level | routed}}})
    assert "|  | 1,000 waiting | 1,000, with a route |" in page
    assert "| jobs dispatched/s | 2,190 | 2,100 |" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (True, "yes"),
        (12345, "12,345"),
    ],
)
def test_cells_show_digits_that_count(value, text):
    assert report.number(value) == text


def test_saved_figures_become_page_and_plots(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "PAGE", tmp_path / "benchmarks.md")
    assert harness.finish(ENGINE, save=True) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == ENGINE
    page = report.write_page()
    drawn = (tmp_path / "benchmarks" / "mixed.svg").read_bytes()
    assert (tmp_path / "benchmarks" / "rates.svg").is_file()
    assert "benchmarks/rates.svg" in page.read_text()
    report.write_page()
    assert (tmp_path / "benchmarks" / "mixed.svg").read_bytes() == drawn


def test_problems_make_the_status(capsys):
    assert harness.finish(ENGINE | {"problems": ["too slow"]}, save=False) == 1
    assert "problem: too slow" in capsys.readouterr().err
