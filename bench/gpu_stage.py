"""One stage of `gpu.py`: prints a JSON object per row as soon as it is known."""

import json
import sys
import time

from harness import quiet_logs


def main() -> int:
    """Runs the stage that the command line names."""
    name, limit_s, facts = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
    quiet_logs()
    if name == "device":
        from gpu_device import stage
    elif name == "checks":
        from gpu_checks import stage
    elif name == "kernels":
        from gpu_kernels import stage
    elif name == "engine":
        from gpu_engine import stage
    elif name == "transformers":
        from gpu_transformers import stage
    else:
        from gpu_mps import stage
    deadline = time.monotonic() + limit_s
    for row in stage(facts, deadline):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
