"""Finds the compiled kernels beside this file and declares their C functions."""

import ctypes
import enum
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from .....shared.errors import EngineError

POINTER = ctypes.c_void_p
LONG = ctypes.c_int64
INT = ctypes.c_int
FLOAT = ctypes.c_float


class AttentionTask(ctypes.Structure):
    """Mirror of `mill::AttentionTask` in csrc/table.h, field by field."""

    _fields_ = (
        ("q", POINTER),
        ("q_stride", LONG),
        ("k", POINTER),
        ("v", POINTER),
        ("k_scale", POINTER),
        ("v_scale", POINTER),
        ("query_start", POINTER),
        ("context_length", POINTER),
        ("block_table", POINTER),
        ("table_stride", LONG),
        ("alibi", POINTER),
        ("out", POINTER),
        ("heads", LONG),
        ("kv_heads", LONG),
        ("dim", LONG),
        ("block_size", LONG),
        ("window", LONG),
        ("scale", FLOAT),
        ("softcap", FLOAT),
        ("alibi_stride", LONG),
        ("store_kind", LONG),
    )


class Linear(ctypes.Structure):
    """Mirror of `mill::Linear` in csrc/operations.h."""

    _fields_ = (
        ("data", POINTER),
        ("scale", POINTER),
        ("bias", POINTER),
        ("outputs", LONG),
        ("inputs", LONG),
        ("wide", LONG),
    )


class LlamaLayer(ctypes.Structure):
    """Mirror of `mill::LlamaLayer` in csrc/llama.h."""

    _fields_ = (
        ("attention_norm", POINTER),
        ("mlp_norm", POINTER),
        ("q_norm", POINTER),
        ("k_norm", POINTER),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("hidden", LONG),
        ("inner", LONG),
        ("epsilon", FLOAT),
    )


class Status(enum.IntEnum):
    """Mirror of `Status` in csrc/kernels.cpp: what the kernels' calls answer."""

    DONE = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


INTERFACE: Final = 4
"""What `tm_interface` must answer: an older build would misread our structs."""
SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "tm_interface": (INT, []),
    "tm_last_error": (ctypes.c_char_p, []),
    "tm_isa": (ctypes.c_char_p, []),
    "tm_use": (INT, [ctypes.c_char_p]),
    "tm_set_threads": (None, [INT]),
    "tm_linear": (
        INT,
        [POINTER, LONG, LONG, LONG, POINTER, POINTER, LONG, POINTER, POINTER, INT],
    ),
    "tm_kv_write": (
        INT,
        [POINTER, LONG, POINTER, LONG, POINTER, *[LONG] * 5, *[POINTER] * 4],
    ),
    "tm_attention": (INT, [POINTER, LONG]),
    "tm_rms_norm": (INT, [POINTER, LONG, LONG, POINTER, LONG, FLOAT, POINTER]),
    "tm_silu_multiply": (INT, [POINTER, LONG, LONG, POINTER]),
    "tm_rotate": (INT, [POINTER, LONG, LONG, LONG, LONG, POINTER, POINTER]),
    "tm_llama_layer": (INT, [*[POINTER] * 6, LONG, LONG]),
}


def load() -> ctypes.CDLL:
    """Returns the library with argument types declared.

    Raises:
        ImportError: It was not built (no compiler at install).
        OSError: It is there but the linker refuses it.
    """
    folder = Path(__file__).parent
    names = [folder / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = [path for path in names if path.exists()]
    if not found:
        raise ImportError(
            "the C++ kernels were not built; install a C++17 compiler and reinstall"
        )
    library = ctypes.CDLL(str(found[0]))
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ImportError(
                f"{found[0].name} is of another version ({error}); reinstall"
            ) from error
        function.restype = result
        function.argtypes = list(arguments)
    if library.tm_interface() != INTERFACE:
        raise ImportError(
            f"{found[0].name} has interface {library.tm_interface()} and "
            f"{INTERFACE} is expected; reinstall to build it again"
        )
    return library


def failure(library: ctypes.CDLL, status: int, asked: str) -> Exception:
    """Returns the exception for a call that did not answer `Status.DONE`.

    Args:
        library: The kernels; asked on the thread that made the call.
        status: What the call answered.
        asked: The operation and its sizes, for the message.

    Returns:
        MemoryError where memory ran out, which a smaller step may mend.
    """
    if status == Status.OUT_OF_MEMORY:
        return MemoryError(
            f"the C++ kernels could not allocate their workspace for {asked}; "
            "free memory, raise the limit, or compute fewer tokens at once"
        )
    reason = library.tm_last_error().decode(errors="replace")
    return EngineError(f"the C++ kernels failed in {asked}: {reason}")
