"""vLLM's CPU build on the workload, in its own interpreter and environment."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from engine_workload import Item, output_tokens
from harness import Figures

VARIABLE = "TOKENMILL_BENCH_VLLM_PYTHON"
SCRIPT = Path(__file__).parent / "peers" / "vllm_mixed.py"


def find(interpreter: Path | None) -> Path | None:
    """Returns the interpreter whose environment has vLLM, or None where there is none.

    Args:
        interpreter: As named on the command line; else `TOKENMILL_BENCH_VLLM_PYTHON`.

    Raises:
        SystemExit: The interpreter that was named cannot import vLLM.
    """
    named = interpreter or (
        Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
    )
    if named is None:
        return None
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    if (
        not named.is_file()
        or subprocess.run([named, "-c", code], check=False).returncode
    ):
        raise SystemExit(f"{named} is no Python interpreter that has the package vllm")
    return named


def run_vllm(
    interpreter: Path, model: Path, items: list[Item], *, max_running: int, threads: int
) -> Figures:
    """Runs all requests, submitted at once, with float32 weights.

    Returns:
        Figures by name; rates in tokens per second, times in seconds.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.json"
        pairs = [(item.token_ids, item.max_tokens) for item in items]
        requests.write_text(json.dumps(pairs), encoding="utf-8")
        result = Path(folder) / "result.json"
        arguments = (interpreter, SCRIPT, model, requests, max_running, result)
        command = [str(argument) for argument in arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode or not result.is_file():
            raise SystemExit(f"vLLM failed:\n{(done.stdout + done.stderr)[-3000:]}")
        figures: Figures = json.loads(result.read_text(encoding="utf-8"))
    if figures["output_tokens"] != output_tokens(items):
        wanted = output_tokens(items)
        raise SystemExit(f"vLLM made {figures['output_tokens']} of {wanted} tokens")
    return figures
