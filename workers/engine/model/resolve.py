"""From a model's name to a directory with its files: local, cache or hub, built-in."""

import os
from pathlib import Path

from ....shared.errors import ModelLoadError
from .builtin import BUILTIN_MODELS, resolve_builtin
from .cache import Progress

_NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "*.safetensors",
    "*.safetensors.index.json",
)
"""What is fetched from a hub: never pickled weights, never code."""


def resolve_model(
    name: str, path: str | None = None, *, progress: Progress | None = None
) -> Path:
    """Finds a model's files.

    Order: a local directory; a built-in name (converted into the cache at its first
    use); a Hugging Face id in the local cache; the hub, unless HF_HUB_OFFLINE is set.

    Args:
        name: The public name, used when `path` is None.
        path: A directory or a hub id.
        progress: Called with the stage and its fraction done.

    Returns:
        A directory with config.json, tokenizer files and safetensors.

    Raises:
        ModelLoadError: Nowhere found; the message says where it was looked for.
    """
    report = progress or _silent
    wanted = path or name
    local = Path(wanted).expanduser()
    if local.is_dir():
        return _checked(local)
    if wanted in BUILTIN_MODELS:
        return _checked(resolve_builtin(BUILTIN_MODELS[wanted], report))
    tried = [f"directory {local} (not there)"]
    tried.append(f"built-in names ({', '.join(sorted(BUILTIN_MODELS))})")
    found = _from_hub(wanted, report, tried)
    if found is not None:
        return _checked(found)
    raise ModelLoadError(
        f"model {wanted!r} was not found; tried: {'; '.join(tried)}. Give a directory "
        "with config.json and safetensors, a hub id such as 'owner/name', or a "
        "built-in name"
    )


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""


def _from_hub(wanted: str, report: Progress, tried: list[str]) -> Path | None:
    if wanted.count("/") != 1 or wanted.startswith((".", "/", "~")):
        tried.append("Hugging Face (the name is not of the form 'owner/name')")
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(_NEEDED_FILES)
    try:
        return Path(
            snapshot_download(wanted, local_files_only=True, allow_patterns=patterns)
        )
    except (LocalEntryNotFoundError, ValueError) as error:
        tried.append(f"Hugging Face cache ({type(error).__name__})")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        tried.append("Hugging Face hub (not asked: HF_HUB_OFFLINE is set)")
        return None
    report(f"downloading {wanted}", 0.0)
    try:
        found = Path(snapshot_download(wanted, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        tried.append(f"Hugging Face hub ({type(error).__name__}: {first_line})")
        return None
    report(f"downloading {wanted}", 1.0)
    return found


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"{directory} has no config.json: expected a transformers checkpoint "
            "(config.json, tokenizer files, *.safetensors)"
        )
    if not any(directory.glob("*.safetensors")):
        raise ModelLoadError(
            f"{directory} has no *.safetensors files: pickled weights are not read; "
            "convert the checkpoint with `save_pretrained`"
        )
    return directory
