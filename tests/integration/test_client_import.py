"""A backend that only enqueues pays for nothing else."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FORBIDDEN = ("torch", "transformers", "numpy", "arq", "tokenizers", "numba", "rich")


def run(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_client_brings_no_model_stack() -> None:
    loaded = run(
        "import sys; from tokenmill import Client, SyncClient, Prompt, Sampling; "
        "print(*sys.modules)"
    )
    found = [m for m in loaded.split() if m.split(".")[0] in FORBIDDEN]
    assert not found


def test_the_client_imports_in_a_third_of_a_second() -> None:
    code = (
        "import time; t = time.process_time(); from tokenmill import Client, "
        "SyncClient; print(time.process_time() - t)"
    )
    best = min(float(run(code)) for _ in range(5))
    assert best < 0.3, f"{best:.3f} s of processor time"
