"""Runs every kernel test in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(
    file.name
    for file in HERE.glob("test_*.py")
    if file.name not in ("test_in_interpreter.py", "test_compiles.py", "test_bench.py")
)

TIMEOUT_S = 1200
"""The interpreter is slow, and other tests may share the cores."""

pytestmark = [
    pytest.mark.timeout(TIMEOUT_S + 20),
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed (extra: gpu or dev)",
    ),
]


def run(files: list[str], report: Path) -> str:
    """Runs some of the files and returns what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         f"--junitxml={report}", *(str(HERE / file) for file in files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """The tests of two child processes by file, as junit cases, and what they printed.

    One core each: whole models, which take about half of the time, and the rest.
    """
    directory = tmp_path_factory.mktemp("kernels")
    reports = [directory / "models.xml", directory / "kernels.xml"]
    halves = [["test_model.py"], [file for file in FILES if file != "test_model.py"]]
    with ThreadPoolExecutor(2) as pool:
        output = "".join(pool.map(run, halves, reports))
    cases: dict[str, list[ET.Element]] = {}
    for case in (
        one for report in reports for one in ET.parse(report).iter("testcase")
    ):
        module = case.get("classname", "").rpartition(".")[2]
        cases.setdefault(f"{module}.py", []).append(case)
    return cases, output


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_interpreter(child, name):
    cases, output = child
    assert cases.get(name), output[-6000:]
    assert not [case.get("name") for case in cases[name] if len(case)], output[-6000:]
