"""A client of MPS for `gpu_mps.py`: works, idles with a context, or commits a fault."""

import json
import sys
import time

import torch

SIZE = 4096
WORK_S = 3.0
FAR = 1 << 20
"""Beyond the tensor: the kernel that finds out traps, which is fatal for a context."""


def main() -> int:
    """Does what the command line says; a JSON line tells what was seen."""
    what = sys.argv[1]
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    left = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    if what == "idle":
        time.sleep(600)
    if what == "fault":
        torch.zeros(8, device="cuda")[torch.tensor([FAR], device="cuda")]
        torch.cuda.synchronize()  # raises here, and the server tells all its clients
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < WORK_S:
        left @ left
        torch.cuda.synchronize()
        rounds += 1
    found = torch.cuda.get_device_properties(0)
    print(
        json.dumps(
            {
                "ms": (time.perf_counter() - began) / rounds * 1e3,
                "free_mib": free >> 20,
                "multiprocessors": found.multi_processor_count,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
