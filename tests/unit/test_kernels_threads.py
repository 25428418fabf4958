"""The kernels' own thread pool: any thread count, several callers, after a fork."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.kernel_cases import backend_named

from tokenmill.workers.engine.kernels import reference

FORK = """
import os, torch
from tokenmill.workers.engine.kernels import ops
ops.set_num_threads(2)
w, x = ops.quantize_weight(torch.ones(640, 640)), torch.ones(64, 640)
before = ops.linear(x, w)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.linear(x, w), before) else 1)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_thread_count_changes_no_bits(threads: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(70, 576), torch.randn(300, 576)
    with backend_named("cpp") as backend:
        weight = backend.quantize_weight(w, activations="int16")
        backend.set_num_threads(threads)
        got = [backend.linear(x, weight, None) for _ in range(50)]
    expected = reference.linear(x, reference.quantize_weight(w))
    assert all(torch.equal(y, expected) for y in got)


@pytest.mark.parametrize("name", ["cpp", "numba"])
def test_callers_at_the_same_time(name: str) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(40, 320) for _ in range(8)]
    w = torch.randn(200, 320)
    with backend_named(name) as backend, ThreadPoolExecutor(4) as pool:
        weight = backend.quantize_weight(w, activations="int16")
        expected = [backend.linear(x, weight, None) for x in inputs]
        for _ in range(10):
            got = list(pool.map(lambda x: backend.linear(x, weight, None), inputs))
            assert all(map(torch.equal, got, expected))


def test_a_forked_child_gets_threads_of_its_own() -> None:
    with backend_named("cpp"):  # skips where it is not built
        done = subprocess.run(
            [sys.executable, "-c", FORK],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert "child ended with 0" in done.stdout, done.stderr
