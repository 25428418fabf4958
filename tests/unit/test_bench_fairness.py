"""What `bench/fairness.py` makes of its rounds."""

import argparse

import pytest
from support.bench_modules import bench_module

fairness = bench_module("fairness")


def one(alone: float, beside: float, offered: float = 80.0):
    times = {"alone": [alone] * 20, "beside_80_percent": [beside] * 20}
    return fairness.Round(times, capacity_per_s=100.0, offered_per_s=offered)


def problems(ratio: float, *, required: bool, offered: float = 80.0) -> list[str]:
    options = argparse.Namespace(require_target=required)
    ratios = {"beside_80_percent_ratio": ratio}
    return fairness.problems_of([one(100, 150, offered)], ratios, options)


def test_a_ratio_is_taken_within_one_round():
    assert one(100.0, 150.0).ratio("beside_80_percent") == pytest.approx(1.5)


def test_too_high_a_ratio_fails_where_the_target_is_required():
    assert problems(1.9, required=True) == []
    assert problems(2.1, required=False) == []
    assert problems(2.1, required=True) == [
        "P95 beside the flood is 2.1 times that alone"
    ]


def test_a_load_that_was_not_offered_is_a_problem():
    assert problems(1.0, required=False, offered=77.0) == []
    assert problems(1.0, required=False, offered=70.0) == ["70 jobs/s offered of 80"]
