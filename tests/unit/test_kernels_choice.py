"""Which backend runs, and that it can be forced and reported."""

import os
import subprocess
import sys

import pytest
import torch

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.kernels import backends, ops
from tokenmill.workers.engine.kernels.cpu import cpp_library
from tokenmill.workers.engine.kernels.layout import KVLayer, PackedWeight, StepLayout

PROGRAM = (
    "from tokenmill.workers.engine.kernels import ops; "
    "print('report', ops.backend_report())"
)


def run_forced(value: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, backends.FORCE_VARIABLE: value}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_report_names_backend_and_reason() -> None:
    report = ops.backend_report()
    assert report["backend"].split("/")[0] in ("c++", "numba", "torch")
    assert report["reason"]


def test_reference_can_be_forced() -> None:
    done = run_forced("reference")
    assert done.returncode == 0, done.stderr
    assert "'backend': 'torch'" in done.stdout
    assert "forced by TOKENMILL_KERNELS" in done.stdout


def test_unknown_name_is_an_error() -> None:
    done = run_forced("fortran")
    assert done.returncode != 0
    assert "'fortran' is not a backend" in done.stderr


def test_without_the_library_the_next_backend_runs_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Absent:
        def __init__(self) -> None:
            raise ImportError("not built")

    cpp = pytest.importorskip("tokenmill.workers.engine.kernels.cpu.cpp_backend")
    monkeypatch.setattr(cpp, "CppBackend", Absent)
    backend, reason = backends._choose(None)
    assert backend.name == "numba"
    assert "cpp unavailable: not built" in reason


def test_layout_of_a_batch() -> None:
    np = pytest.importorskip("numpy")
    batch = StepBatch(
        token_ids=np.arange(4),
        positions=np.array([6, 7, 8, 0]),
        slices=(
            SequenceSlice(
                query_start=0, query_length=3, context_length=9, block_table=(4, 2, 7)
            ),
            SequenceSlice(
                query_start=3, query_length=1, context_length=1, block_table=(5,)
            ),
        ),
        logit_rows=np.array([2, 3]),
    )
    layout = StepLayout.from_batch(batch, 4)
    assert layout.slot_mapping.tolist() == [2 * 4 + 2, 2 * 4 + 3, 7 * 4, 5 * 4]
    assert layout.query_start.tolist() == [0, 3, 4]
    assert layout.context_length.tolist() == [9, 1]
    assert layout.block_table.tolist() == [[4, 2, 7], [5, 0, 0]]
    assert layout.positions.tolist() == [6, 7, 8, 0]


def test_sizes_in_bytes() -> None:
    weight = ops.quantize_weight(torch.randn(16, 64))
    assert isinstance(weight, PackedWeight)
    assert weight.nbytes == 16 * 64 + 16 * 4
    layer = KVLayer.allocate(2, 3, 8, 16, kind="float32")
    assert layer.k.dtype == torch.float32
    assert layer.k_scale is None


def test_a_library_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not backends.backend_report()["backend"].startswith("c++"):
        pytest.skip("the C++ kernels are not built here")
    monkeypatch.setattr(cpp_library, "INTERFACE", cpp_library.INTERFACE + 1)
    with pytest.raises(ImportError, match="is expected; reinstall"):
        cpp_library.load()
