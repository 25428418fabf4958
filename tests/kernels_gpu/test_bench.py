"""The GPU machine's script runs from end to end, on a tiny model without a GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"
TIMEOUT_S = 920

pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 20),
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed (extra: gpu or dev)",
    ),
]


def test_every_stage_gives_its_rows():
    done = subprocess.run(
        ["bash", str(SCRIPT), "--cpu-smoke"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    stages: dict[str, list[str]] = {}
    for row in found["rows"]:
        stages.setdefault(row["stage"], []).append(row["what"])
    assert found["bad"] == 0
    names = ["device", "checks", "kernels", "engine", "transformers", "mps"]
    assert list(stages) == names
    checked = " ".join(stages["checks"])
    for kernel in ("quantize_rows", "linear", "kv_write", "decode", "prefill"):
        assert kernel in checked
    assert "int4" in checked
    assert any("engine int8" in what for what in stages["engine"])
