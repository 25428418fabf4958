"""Probes of the host: plausible figures, in a short time, and nothing left changed."""

from __future__ import annotations

import torch

from tokenmill.workers.host_speed import compute_rates, host_bandwidth


def test_figures_are_of_the_right_size() -> None:
    assert 1e8 < host_bandwidth() < 5e12
    before = torch.get_num_threads()
    rates = compute_rates(["float32", "int8", "nf4"], rows=16, threads=1)
    assert set(rates) == {"float32", "int8"}
    assert all(1e8 < rate < 1e15 for rate in rates.values())
    assert torch.get_num_threads() == before


def test_each_thread_counts() -> None:
    one = compute_rates(["int8"], rows=16, threads=1)["int8"]
    assert compute_rates(["int8"], rows=16, threads=64)["int8"] > 8 * one
