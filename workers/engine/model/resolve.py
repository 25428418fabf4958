"""From a model's name to a directory with its files: local, cache or hub, built-in."""

import os
from pathlib import Path

from ....shared.errors import ModelLoadError
from .builtin import BUILTIN_MODELS, resolve_builtin
from .cache import Progress
from .families import family_of
from .gguf.convert import resolve_gguf
from .headers import read_headers

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
_GGUF_MAGIC = b"GGUF"
_NAMED_IN_MESSAGE = 5


def resolve_model(
    name: str, path: str | None = None, *, progress: Progress | None = None
) -> Path:
    """Finds a model's files.

    Order: a local directory or GGUF file; a built-in name; a Hugging Face id in the
    local cache; the hub, unless HF_HUB_OFFLINE is set. GGUF files and the built-in
    model are converted into the cache at their first use.

    Args:
        name: The public name, used when `path` is None.
        path: A directory, a GGUF file or a hub id.
        progress: Called with the stage and its fraction done.

    Returns:
        A directory with config.json, tokenizer files and safetensors.

    Raises:
        ModelLoadError: Nowhere found; the message says where it was looked for. Or
            found, but damaged, of an unknown architecture or in pickles.
    """
    report = progress or _silent
    wanted = path or name
    local = Path(wanted).expanduser()
    if local.is_dir():
        return _from_directory(local, report)
    if local.is_file():
        return _from_file(local, report)
    if wanted in BUILTIN_MODELS:
        return _checked(resolve_builtin(BUILTIN_MODELS[wanted], report))
    tried = [f"directory or file {local} (not there)"]
    tried.append(f"built-in names ({', '.join(sorted(BUILTIN_MODELS))})")
    found = _from_hub(wanted, report, tried)
    if found is not None:
        return _checked(found)
    raise ModelLoadError(
        f"model {wanted!r} was not found; tried: {'; '.join(tried)}. Give a directory "
        "with config.json and safetensors, a .gguf file, a hub id such as "
        "'owner/name', or a built-in name"
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


def _from_directory(directory: Path, report: Progress) -> Path:
    """Takes safetensors if there are any, else the one GGUF file."""
    files = sorted(directory.glob("*.gguf"))
    if any(directory.glob("*.safetensors")) or not files:
        return _checked(directory)
    if len(files) > 1:
        raise ModelLoadError(
            f"{directory} has {len(files)} GGUF files; give the path of one: "
            f"{', '.join(file.name for file in files[:_NAMED_IN_MESSAGE])}"
        )
    return _checked(resolve_gguf(files[0], report))


def _from_file(file: Path, report: Progress) -> Path:
    with file.open("rb") as stream:
        magic = stream.read(len(_GGUF_MAGIC))
    if magic == _GGUF_MAGIC or file.suffix == ".gguf":
        return _checked(resolve_gguf(file, report))
    if file.suffix == ".safetensors":
        raise ModelLoadError(
            f"{file} holds weights alone; give its directory, with config.json and "
            "tokenizer.json"
        )
    raise ModelLoadError(
        f"{file} is no GGUF file (it does not begin with 'GGUF'); expected one, or a "
        "directory with config.json and safetensors. Pickles are never read"
    )


def _checked(directory: Path) -> Path:
    """Refuses what cannot be served, from its small files and headers alone."""
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"{directory} has no config.json: expected a transformers checkpoint "
            "(config.json, tokenizer files, *.safetensors)"
        )
    if not any(directory.glob("*.safetensors*")):
        pickles = sorted(
            file.name
            for file in directory.iterdir()
            if file.suffix in {".bin", ".pt", ".pth", ".ckpt"}
        )
        found = f" (it has {', '.join(pickles[:_NAMED_IN_MESSAGE])})" if pickles else ""
        raise ModelLoadError(
            f"{directory} has no *.safetensors files{found}: pickled weights are never "
            "read, since they can run code; convert the checkpoint with "
            "`save_pretrained`"
        )
    family_of(directory)
    read_headers(directory)
    return directory
