"""Finds the compiled kernels beside this file and declares their C functions."""

import ctypes
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

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


INTERFACE: Final = 3
"""What `tm_interface` must answer: an older build would misread our structs."""
SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "tm_interface": (INT, []),
    "tm_isa": (ctypes.c_char_p, []),
    "tm_use": (INT, [ctypes.c_char_p]),
    "tm_set_threads": (None, [INT]),
    "tm_linear": (
        None,
        [POINTER, LONG, LONG, LONG, POINTER, POINTER, LONG, POINTER, POINTER, INT],
    ),
    "tm_kv_write": (
        None,
        [POINTER, LONG, POINTER, LONG, POINTER, *[LONG] * 5, *[POINTER] * 4],
    ),
    "tm_attention": (None, [POINTER, LONG]),
    "tm_rms_norm": (None, [POINTER, LONG, LONG, POINTER, LONG, FLOAT, POINTER]),
    "tm_silu_multiply": (None, [POINTER, LONG, LONG, POINTER]),
    "tm_rotate": (None, [POINTER, LONG, LONG, LONG, LONG, POINTER, POINTER]),
    "tm_llama_layer": (None, [*[POINTER] * 6, LONG, LONG]),
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
