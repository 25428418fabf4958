"""Runs the GPU's stages, each in a process of its own and within its time.

    bench/gpu.sh                  on a GPU
    bench/gpu.sh --cpu-smoke      on a CPU: tiny sizes, Triton's interpreter

A stage that hangs, crashes or spoils its CUDA context loses its own later lines and
nothing else. The last line printed is one JSON object with every figure.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

STAGES = {
    "device": 40.0, "checks": 95.0, "kernels": 70.0, "engine": 145.0,
    "transformers": 60.0, "mps": 40.0,
}  # fmt: skip
"""Seconds that each may take; a stage gets what its forerunners left over as well."""
SMOKE_S = 150.0
"""Seconds of a stage on a CPU, where it takes ten to twenty if others leave it one."""
HERE = Path(__file__).parent
Row = dict[str, object]


def run_stage(name: str, limit_s: float, facts: Row) -> list[Row]:
    """Runs a stage and returns its rows, with one more if it did not end well.

    Args:
        name: One of `STAGES`.
        limit_s: Seconds after which it is ended.
        facts: What the stage `device` found, and whether this is the smoke run.
    """
    command = [
        sys.executable, str(HERE / "gpu_stage.py"), name, str(limit_s),
        json.dumps(facts),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    rows: list[Row] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            row: Row = json.loads(line)
            rows.append({"stage": name, **row})
            print(table_line(row), flush=True)
    code = process.wait()
    ended = not timer.is_alive()
    timer.cancel()
    if code:
        reason = f"ended after {limit_s:.0f} s" if ended else f"exit status {code}"
        rows.append({"stage": name, "failed": reason})
        print(f"  {name} did not end well: {reason}", flush=True)
    return rows


def table_line(row: Row) -> str:
    """Returns a row as a line of the table."""
    cells = []
    for name, value in row.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        cells.append(f"{shown:<30}" if name == "what" else f"{name} {shown}")
    return "  " + "  ".join(cells)


def main() -> int:
    """Runs every stage; 1 if one failed or disagreed, 3 without a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-smoke", action="store_true")
    smoke = parser.parse_args().cpu_smoke
    began = time.monotonic()
    rows: list[Row] = []
    facts: Row = {}
    allowed = 0.0
    with tempfile.TemporaryDirectory() as directory:
        for name, limit_s in STAGES.items():
            allowed += SMOKE_S if smoke else limit_s
            print(f"== {name}", flush=True)
            left = began + allowed - time.monotonic()
            found = run_stage(name, left, {**facts, "smoke": smoke})
            rows += found
            if name == "device":
                if not found or "failed" in found[0]:
                    return 3
                facts = {**found[0], "directory": directory}
    bad = [row for row in rows if "failed" in row or row.get("agrees") is False]
    print(f"== {len(rows)} rows, {len(bad)} bad, {time.monotonic() - began:.0f} s")
    print(json.dumps({"benchmark": "gpu", "rows": rows, "bad": len(bad)}))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
