"""A checkpoint in llama.cpp's format with Q8_0 weights, made once and kept.

    python bench/peers/make_q8_0.py --llama-cpp BUILD_DIRECTORY [--model smollm2-135m]

Runs llama.cpp's own converter on the very checkpoint that the other sides run;
`engine.py` does it by itself where the file is missing.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tokenmill.workers.engine.model.cache import cache_directory
from tokenmill.workers.engine.model.resolve import resolve_model

CONVERTER = "convert_hf_to_gguf.py"
SOURCE_VARIABLE = "TOKENMILL_BENCH_LLAMA_CPP_SOURCE"
HOME_ENTRY = "CMAKE_HOME_DIRECTORY:INTERNAL="


def q8_0_model(model: Path, programs: Path) -> Path:
    """Returns the Q8_0 form of a checkpoint, and makes it where it is missing.

    Args:
        model: Checkpoint directory with config.json, tokenizer and safetensors.
        programs: Folder of llama.cpp's programs.

    Raises:
        SystemExit: llama.cpp's source is not at hand, or its converter failed.
    """
    target = cache_directory().parent / "bench" / f"{model.name}-q8_0.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}.unfinished")
    command = [sys.executable, str(source_of(programs) / CONVERTER), str(model)]
    command += ["--outtype", "q8_0", "--outfile", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    unfinished.replace(target)
    return target


def source_of(programs: Path) -> Path:
    """Returns the source folder that llama.cpp's programs were built from.

    The build directory's CMakeCache.txt names it, unless the environment does.
    """
    if named := os.environ.get(SOURCE_VARIABLE):
        return Path(named)
    for folder in (programs, programs.parent):
        cache = folder / "CMakeCache.txt"
        if cache.is_file():
            for line in cache.read_text(encoding="utf-8").splitlines():
                if line.startswith(HOME_ENTRY):
                    return Path(line.removeprefix(HOME_ENTRY))
    raise SystemExit(
        f"the Q8_0 model needs {CONVERTER} of the source, and no CMakeCache.txt "
        f"beside {programs} names it: set {SOURCE_VARIABLE} to the source folder"
    )


def main() -> None:
    """Makes the file and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder `bin`")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    print(q8_0_model(resolve_model(options.model, None), options.llama_cpp))


if __name__ == "__main__":
    main()
