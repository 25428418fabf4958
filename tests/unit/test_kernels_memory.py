"""Memory that runs out inside the C++ kernels: an error that a smaller step mends."""

import subprocess
import sys
from ctypes import CDLL
from typing import cast

import pytest
from support.kernel_cases import backend_named

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.kernels.cpu.cpp_library import Status, failure
from tokenmill.workers.engine.recovery import is_out_of_memory

SETUP = """
import mmap, resource, torch
from pathlib import Path
from tokenmill.workers.engine.kernels.cpu.cpp_backend import CppBackend
from tokenmill.workers.engine.kernels.layout import KVLayer, StepLayout

MIB = 1 << 20
backend = CppBackend()
backend.set_num_threads(THREADS)

def leave(room):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * mmap.PAGESIZE + room
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))

def refused(call):
    try:
        call()
    except MemoryError as error:
        return str(error)
    raise SystemExit("no MemoryError")
"""

LINEAR = """
w = backend.quantize_weight(torch.randn(16, 4096), activations="int16")
row = torch.randn(1, 4096)
few, many = row.expand(64, 4096), row.expand(1 << 16, 4096)
before = backend.linear(few, w, None)
leave(128 * MIB)  # `many` needs 512 MiB of INT16 activations
for _ in range(3):
    print(refused(lambda: backend.linear(many, w, None)))
    assert torch.equal(backend.linear(few, w, None), before)
"""

ATTENTION = """
def case(dim, sequences):
    layer = KVLayer.allocate(1, 1, 4, dim, kind="int8")
    zeros = torch.zeros(sequences, dtype=torch.int32)
    layout = StepLayout(
        query_start=torch.arange(sequences + 1, dtype=torch.int32),
        context_length=zeros + 1,
        block_table=zeros[:, None].contiguous(),
        slot_mapping=zeros.long(),
        positions=zeros.long(),
    )
    q = torch.randn(sequences, 1, dim)
    return lambda: backend.paged_attention(
        q, layer, layout, scale=1.0, window=None, alibi=None, softcap=None
    )

small, large = case(64, 32), case(1 << 18, 32)  # `large`: 208 MiB of scratch a thread
before = small()
leave(128 * MIB)
for _ in range(100):
    message = refused(large)
    assert torch.equal(small(), before)
print(message)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS binds on Linux only")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (LINEAR, "workspace for linear [65536, 4096 -> 16]"),
        (ATTENTION, "workspace for attention of 32 tokens in 32 sequences"),
    ],
    ids=["linear", "attention"],
)
def test_a_workspace_that_does_not_fit_leaves_a_process_that_works(
    script: str, message: str, threads: int
) -> None:
    with backend_named("cpp"):  # skips where it is not built
        done = subprocess.run(
            [sys.executable, "-c", SETUP.replace("THREADS", str(threads)) + script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert message in done.stdout


def test_what_else_the_kernels_throw_is_an_engine_error_with_the_reason() -> None:
    class Library:
        def tm_last_error(self) -> bytes:
            return b"vector::_M_default_append"

    library = cast("CDLL", Library())
    error = failure(library, Status.FAILED, "rotate [1, 2, 64]")
    assert isinstance(error, EngineError)
    assert "failed in rotate [1, 2, 64]: vector::_M_default_append" in str(error)
    assert not is_out_of_memory(error)
    assert is_out_of_memory(failure(library, Status.OUT_OF_MEMORY, "rotate"))
