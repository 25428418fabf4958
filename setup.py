"""Builds the optional C++ kernels; everything else is in pyproject.toml.

Without a compiler the install succeeds and Numba kernels run instead.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("workers/engine/kernels/cpu/csrc")
COMMON = [
    "-O3",
    "-g0",  # Python's own flags ask for debug symbols: five times the size
    "-std=c++17",
    "-ffp-contract=off",  # one rounding per operation: the same bits everywhere
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # false in GCC 12's own AVX-512 header
]
AVX2 = ["-mavx2", "-mfma"]
X86_SETS = {
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512vnni": [
        *AVX2,
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512vnni",
    ],
}


class BuildKernels(build_ext):
    """Compiles each instruction set with its own flags; the CPU chooses at run time."""

    def build_extension(self, ext: Extension) -> None:
        """Compiles and links the library.

        Args:
            ext: The kernels.

        Raises:
            CompileError: No C++17 compiler; the extension is optional.
        """
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects, defined = [], []
        for name, flags in X86_SETS.items() if x86 else ():
            try:
                objects += self._compile(f"isa_{name}.cpp", flags, [])
                defined.append((f"TM_WITH_{name.upper()}", "1"))
            except CompileError as error:
                self.warn(f"kernels without {name}: {error}")
        objects += self._compile("isa_baseline.cpp", [], [])
        objects += self._compile("kernels.cpp", [], defined)
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(
            objects,
            target,
            extra_postargs=["-pthread"],
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def _compile(
        self, name: str, flags: list[str], defined: list[tuple[str, str]]
    ) -> list[str]:
        return list(
            self.compiler.compile(
                [str(SOURCES / name)],
                output_dir=self.build_temp,
                macros=defined,
                extra_postargs=[*COMMON, *flags],
            )
        )


def kernels() -> list[Extension]:
    """Returns the extension, or nothing where it cannot or shall not be built."""
    if sys.platform == "win32" or os.environ.get("TOKENMILL_BUILD_KERNELS") == "0":
        return []
    return [
        Extension(
            "tokenmill.workers.engine.kernels.cpu._kernels",
            sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
