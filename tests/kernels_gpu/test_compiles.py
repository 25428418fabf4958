"""Every kernel compiles to machine code for NVIDIA devices; no device is needed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MOST_SHARED_MEMORY = 99 * 1024
"""Bytes a block may have on the smallest of these devices (compute capability 8.6)."""

TIMEOUT_S = 900

pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 20),
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed (extra: gpu or dev)",
    ),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))

    def compile_for(capability: str) -> list[dict[str, object]]:
        done = subprocess.run(
            [sys.executable, str(HERE / "compile_for_devices.py"), capability],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(2) as pool:
        return [entry for part in pool.map(compile_for, ("86", "90")) for entry in part]


def test_every_kernel_gives_machine_code_that_fits(compiled):
    assert len({entry["kernel"] for entry in compiled}) == 8
    assert {entry["capability"] for entry in compiled} == {86, 90}
    for entry in compiled:
        assert entry["bytes"] > 1000
        assert entry["shared"] <= MOST_SHARED_MEMORY, entry


def test_products_run_on_tensor_cores(compiled):
    for entry in compiled:
        products = " ".join(entry["products"])
        if entry["kernel"] in ("_linear_kernel", "_matmul_kernel"):
            assert "s8" in products, entry
        if entry["precision"] == "tf32":
            assert "tf32" in products, entry
        if entry["precision"] == "ieee":
            assert not products, entry


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("capability", [86, 90])
def test_decode_and_prefill_reduce_a_row_in_the_same_layout(compiled, capability, bits):
    layouts = [
        entry["layouts"]
        for entry in compiled
        if (entry["capability"], entry["bits"]) == (capability, bits)
        and entry["precision"] == "tf32"
    ]
    assert len(layouts) == 2
    assert layouts[0] == layouts[1] != []


def test_roundings_are_not_fused(compiled):
    for entry in compiled:
        if entry["kernel"] == "_linear_kernel":
            assert not entry["fused"], entry
