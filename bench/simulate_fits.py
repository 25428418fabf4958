"""Step times of the real engine, for simulated groups."""

import json
from pathlib import Path

from harness import RESULTS, cores, in_own_process

Fits = list[tuple[float, float]]
"""(a, b): a step of n tokens takes a + b n ms."""


def saved_fits() -> Fits:
    """Returns the step-time fits of the engine benchmark's last saved run."""
    report = json.loads((RESULTS / "engine.json").read_text(encoding="utf-8"))
    return [
        (side["step_fit_base_ms"], side["step_fit_ms_per_token"])
        for side in report["mixed"]["tokenmill"]
    ]


def measured_fits(model: str) -> Fits:
    """Runs the engine on part of its benchmark and returns the step-time fit."""
    from engine_ours import run_ours
    from engine_workload import read_workload

    from tokenmill.workers.engine.model.resolve import resolve_model

    path = resolve_model(model)
    workload = Path(__file__).parent / "workloads" / "mixed.jsonl"
    figures = in_own_process(
        run_ours,
        path,
        read_workload(workload, path, 32),
        weights="int8",
        kv="int8",
        max_running=16,
        threads=cores(),
    )
    return [(figures["step_fit_base_ms"], figures["step_fit_ms_per_token"])]
