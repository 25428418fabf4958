"""The kernel tests need Triton's interpreter, or a GPU, from their first import on.

Triton decides at import whether it interprets, and other tests of a session import it
too. So a plain run collects `test_in_interpreter.py`, which runs each of the other
files in a process of its own, `test_compiles.py` and `test_bench.py`. To run one file
by itself:

    TRITON_INTERPRET=1 pytest tests/kernels_gpu/test_attention.py   on a CPU
    TOKENMILL_TEST_DEVICE=cuda pytest tests/kernels_gpu             on a GPU
"""

import inspect
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # `kernel_cases` without a package

ON_DEVICE = os.environ.get("TOKENMILL_TEST_DEVICE", "cpu") != "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton")
ENTRY = {"test_in_interpreter.py", "test_compiles.py", "test_bench.py"}

collect_ignore = [
    file.name
    for file in HERE.glob("test_*.py")
    if (file.name in ENTRY) == bool(ON_DEVICE or INTERPRETED)
]

# The interpreter takes milliseconds an operation: few examples, the same in every run.
settings.register_profile(
    "kernels",
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
if INTERPRETED or ON_DEVICE:
    settings.load_profile("kernels")


@pytest.fixture(autouse=True, scope="session")
def quick_calls() -> Iterator[None]:
    """Keeps the names of Triton's built-ins, which the interpreter puts its own for.

    It looks for them in every call of a function, which is a quarter of its time.
    """
    if not INTERPRETED:
        yield
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[object, list[str]] = {}

    def patch_builtin(package, *how):
        if package not in names:
            found = inspect.getmembers(package)
            names[package] = [name for name, member in found if is_builtin(member)]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@pytest.fixture(scope="session")
def ordered_products() -> None:
    """Makes the interpreter add up a product's terms in the order of the inner index.

    It leaves products to numpy, whose BLAS treats the rows of one matrix differently;
    a tensor core does not. Tests of equal bits need a product without that.
    """
    if ON_DEVICE:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right = (t.data.astype(d.data.dtype) for t in (a, b))
        # Over an axis that is not the last, numpy adds one element after the other.
        terms = left[:, :, None] * right[None]
        return TensorHandle(
            d.data + terms.sum(axis=1, dtype=d.data.dtype), d.dtype.scalar
        )

    InterpreterBuilder.create_dot = create_dot
