"""Converts a llama GGUF file into a transformers checkpoint, once, into the cache."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .....shared.errors import ModelLoadError
from ..cache import Progress, build_once, cache_directory
from .llama import LlamaGguf
from .tokenizer import save_tokenizer

if TYPE_CHECKING:
    import numpy as np

CONVERTER_VERSION: Final = 1
"""Raised when the files written below change, so that old caches are not used."""
SHARD_BYTES: Final = 2 << 30
"""Weights are written in files of about this size, which bounds memory."""
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Taken from beside a GGUF file, where they go before the tokenizer inside."""
_SAMPLE_BYTES: Final = 1 << 20


def resolve_gguf(source: Path, progress: Progress) -> Path:
    """Returns a GGUF file's converted form, converting it at the first use.

    Args:
        source: The file. Tokenizer files beside it are used if they are there.
        progress: Told what is going on.

    Returns:
        A directory with config, tokenizer and float32 safetensors.

    Raises:
        ModelLoadError: Damaged, or not a llama model; see `convert_gguf`.
    """
    # Part of the name, for people; the digest tells files apart.
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).strip(".-")[:60] or "model"
    folder = f"{stem}-{_digest(source)}-c{CONVERTER_VERSION}"
    return build_once(
        cache_directory() / folder,
        lambda directory, report: convert_gguf(source, directory, report),
        progress,
    )


def _digest(source: Path) -> str:
    """Names a file by its size, time and samples, and what lies beside it."""
    digest = hashlib.sha256()
    try:
        status = source.stat()
        digest.update(f"{status.st_size}/{status.st_mtime_ns}/".encode())
        with source.open("rb") as stream:
            for offset in (0, status.st_size // 2, status.st_size - _SAMPLE_BYTES):
                stream.seek(max(0, offset))
                digest.update(stream.read(_SAMPLE_BYTES))
        for file in _beside(source):
            digest.update(file.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{source} cannot be read: {error}") from error
    return digest.hexdigest()[:12]


def _beside(source: Path) -> list[Path]:
    """Returns tokenizer files next to a GGUF file, or none of them."""
    files = [source.with_name(name) for name in TOKENIZER_FILES]
    return [file for file in files if file.is_file()] if files[0].is_file() else []


def convert_gguf(source: Path, directory: Path, progress: Progress) -> None:
    """Writes a transformers checkpoint from a llama GGUF file.

    Args:
        source: The GGUF file.
        directory: An empty directory to fill.
        progress: Told the stage and its fraction done.

    Raises:
        ModelLoadError: The file is damaged, not a llama model, or its tokenizer is of
            another kind and no tokenizer.json lies beside it.
    """
    progress("reading the model file", 0.0)
    gguf = LlamaGguf(source)
    config = gguf.config()
    _write_json(directory / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in special if key in config},
    )
    beside = _beside(source)
    for file in beside:
        shutil.copyfile(file, directory / file.name)
    if not beside:
        save_tokenizer(gguf, directory)
    _write_weights(gguf, directory, progress)


def _write_weights(gguf: LlamaGguf, directory: Path, progress: Progress) -> None:
    shards = _Shards(directory)
    total = gguf.num_tensors()
    for index, (name, values) in enumerate(gguf.tensors()):
        shards.add(name, values)
        progress("converting weights", (index + 1) / total)
    progress("writing weights", 0.0)
    shards.close()
    progress("writing weights", 1.0)


class _Shards:
    """Writes tensors into files of a bounded size, with an index if it takes several.

    Args:
        directory: Where they go.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, np.ndarray] = {}
        self._size = 0
        self._places: dict[str, str] = {}
        self._count = 0

    def add(self, name: str, values: "np.ndarray") -> None:
        """Adds a tensor; a full file is written first."""
        if self._tensors and self._size + values.nbytes > SHARD_BYTES:
            self._count += 1
            self._flush(f"model-{self._count:05}.safetensors")
        self._tensors[name] = values
        self._size += values.nbytes

    def close(self) -> None:
        """Writes what is left, and the index."""
        if not self._count:
            self._flush("model.safetensors")
            return
        self._flush(f"model-{self._count + 1:05}.safetensors")
        _write_json(
            self._directory / "model.safetensors.index.json",
            {"metadata": {}, "weight_map": self._places},
        )

    def _flush(self, name: str) -> None:
        from safetensors.numpy import save_file

        save_file(self._tensors, self._directory / name, metadata={"format": "pt"})
        self._places |= dict.fromkeys(self._tensors, name)
        self._tensors, self._size = {}, 0


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
