"""Imports transformers without what serving never uses: seconds of every start.

While transformers is imported, a few of its neighbours look absent or are replaced by
light stand-ins: the compiler (torch._dynamo, which its decorators touch), distributed
tensors and scipy (for training losses). Afterwards everything is there as before, and
is imported for real by whoever asks for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

import structlog
import torch
import torch.distributed

F = TypeVar("F")

_COMPILER: Final = "torch._dynamo"
_TRACING: Final = f"{_COMPILER}._trace_wrapped_higher_order_op"
_PACKAGES: Final = ("transformers.modeling_utils", "transformers.masking_utils")


def import_transformers() -> None:
    """Imports transformers' model code, lean if that works and plainly if not.

    Does nothing when it is imported already.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    try:
        with _lean():
            _import()
    except (ImportError, AttributeError, TypeError) as error:
        # Another release may need more; what failed is not in sys.modules any more.
        structlog.get_logger("tokenmill.model").info(
            "lean_import_failed", error=str(error), cost="about two seconds at start"
        )
        _import()


def _import() -> None:
    for name in _PACKAGES:
        importlib.import_module(name)


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if _COMPILER not in sys.modules:
            stack.enter_context(_compiler_stand_in())
        if "scipy" not in sys.modules:
            stack.enter_context(_absent("scipy"))
        stack.enter_context(_replaced(torch.distributed, "is_available", _no))
        import transformers  # noqa: F401  (its own init, before the next replacement)
        from transformers.utils import import_utils

        scan = import_utils.define_import_structure
        stack.enter_context(
            _replaced(import_utils, "define_import_structure", partial(_scan, scan))
        )
        yield


def _no() -> bool:
    return False


def _scan(
    scan: Callable[[Path | str, str | None], object],
    place: Path | str,
    prefix: str | None = None,
) -> object:
    """Names a folder as transformers' init did, so that its cached scan is found."""
    path = Path(place)
    return scan(path.parent if path.suffix == ".py" else path, prefix)


@contextlib.contextmanager
def _replaced(owner: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _absent(name: str) -> Iterator[None]:
    """Makes a package that is not imported yet look as if it were not installed."""
    sys.modules[name] = None  # type: ignore[assignment]  # as documented for imports
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def _compiler_stand_in() -> Iterator[None]:
    """Gives decorators of the compiler that change nothing: nothing is compiled here.

    Where a model is compiled after all, transformers' marks for the compiler are
    missing, which costs it speed and no result.
    """
    compiler, tracing = ModuleType(_COMPILER), ModuleType(_TRACING)
    compiler.__path__ = []
    for name in ("assume_constant_result", "allow_in_graph"):
        setattr(compiler, name, _unchanged)
    compiler.__dict__["disable"] = _disable
    tracing.__dict__["TransformGetItemToIndex"] = _transform_getitem_to_index
    sys.modules[_COMPILER], sys.modules[_TRACING] = compiler, tracing
    setattr(torch, "_dynamo", compiler)  # noqa: B010  (torch declares it as lazy)
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_TRACING]
        delattr(torch, "_dynamo")


def _unchanged(function: F) -> F:
    return function


def _disable(function: object = None, *_options: object, **_named: object) -> object:
    return _unchanged if function is None else function


def _transform_getitem_to_index() -> object:
    """Makes the real object, once somebody traces a mask through it."""
    module = importlib.import_module(_TRACING)
    return module.TransformGetItemToIndex()
