"""Where calibrations are kept, how they are read, and which one a model gets."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import structlog
import torch

from .....shared.errors import ModelLoadError
from ..cache import cache_directory
from .fingerprint import weights_fingerprint
from .result import FORMAT, Calibration, Facts

FILE_NAME: Final = "tokenmill-calibration.safetensors"
"""Beside a checkpoint."""
SHIPPED: Final = Path(__file__).parent / "shipped"
"""Calibrations that come with the project, by fingerprint."""
_METADATA_KEY: Final = "tokenmill"
log = structlog.get_logger("tokenmill.model")


class Found(msgspec.Struct, frozen=True):
    """A model's calibration, or why it has none."""

    calibration: Calibration | None
    source: str
    """For people: the file, or what is done without one."""


def find_calibration(path: Path) -> Found:
    """Looks beside the checkpoint, then in the cache, then among those shipped.

    A file that is damaged or belongs to other weights is passed over with a warning:
    it costs some quality, and a model without one is served just as well.

    Args:
        path: A checkpoint directory.
    """
    beside = path / FILE_NAME
    if not any(file.is_file() for file in (beside, *_folders())):
        return Found(None, "none: scales from the weights alone")
    fingerprint = weights_fingerprint(path)
    name = f"{fingerprint}.safetensors"
    for file in (beside, cache_folder() / name, SHIPPED / name):
        if not file.is_file():
            continue
        try:
            calibration = read_calibration(file)
            _check_model(calibration, fingerprint, file)
        except ModelLoadError as error:
            log.warning("calibration_passed_over", file=str(file), reason=str(error))
            continue
        return Found(calibration, _described(file, beside))
    return Found(None, "none: scales from the weights alone")


def _folders() -> list[Path]:
    """Returns every calibration in the cache and among those shipped."""
    return [
        file
        for folder in (cache_folder(), SHIPPED)
        for file in folder.glob("*.safetensors")
    ]


def _described(file: Path, beside: Path) -> str:
    if file == beside:
        return f"beside the checkpoint: {file}"
    return "shipped" if file.parent == SHIPPED else f"cache: {file}"


def cache_folder() -> Path:
    """Returns the folder of calibrations made here (may not exist yet)."""
    return cache_directory().parent / "calibrations"


def read_calibration(file: Path) -> Calibration:
    """Reads a calibration.

    Args:
        file: Written by `write_calibration`.

    Raises:
        ModelLoadError: Not a calibration, damaged, or of another format.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            header = (stored.metadata() or {})[_METADATA_KEY]
            facts = msgspec.json.decode(header, type=Facts)
            tensors = {
                name: stored.get_tensor(name).float()
                for name in stored.keys()  # noqa: SIM118  (not a mapping)
            }
    except (OSError, KeyError, SafetensorError, msgspec.MsgspecError) as error:
        raise ModelLoadError(
            f"{file} is no calibration or is damaged ({error}); make it again with "
            "`tokenmill calibrate`"
        ) from error
    if facts.format != FORMAT:
        raise ModelLoadError(
            f"{file} has format {facts.format}, expected {FORMAT}; make it again with "
            "`tokenmill calibrate`"
        )
    for name, values in tensors.items():
        if not _usable(name, values):
            raise ModelLoadError(
                f"{file}: {name} has values that are no scales or means; make it again "
                "with `tokenmill calibrate`"
            )
    return Calibration(facts, tensors)


def _usable(name: str, values: torch.Tensor) -> bool:
    finite = bool(torch.isfinite(values).all())
    return finite and (not name.endswith("_scale") or bool((values > 0).all()))


def _check_model(calibration: Calibration, fingerprint: str, file: Path) -> None:
    """Refuses a calibration that belongs to other weights."""
    if calibration.facts.fingerprint != fingerprint:
        raise ModelLoadError(
            f"{file} belongs to weights {calibration.facts.fingerprint}, but these are "
            f"{fingerprint}; run `tokenmill calibrate` on this checkpoint"
        )


def checked_calibration(file: Path, path: Path) -> Calibration:
    """Reads a calibration that was asked for by name.

    Args:
        file: The calibration.
        path: The checkpoint that it is to serve.

    Raises:
        ModelLoadError: Damaged, or for other weights.
    """
    calibration = read_calibration(file)
    _check_model(calibration, weights_fingerprint(path), file)
    return calibration


def write_calibration(calibration: Calibration, file: Path) -> None:
    """Writes a calibration, whole or not at all; tensors as float16.

    Args:
        calibration: What to write.
        file: Its place; folders are made.

    Raises:
        OSError: It cannot be written there.
    """
    from safetensors.torch import save

    header = msgspec.json.encode(calibration.facts).decode()
    halves = {name: t.half().contiguous() for name, t in calibration.tensors.items()}
    content = save(halves, metadata={_METADATA_KEY: header})
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(partial).chmod(0o644)
        Path(partial).replace(file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(partial).unlink()


def save_for(calibration: Calibration, path: Path) -> Path:
    """Keeps a calibration where a worker finds it.

    Args:
        calibration: Of the checkpoint's weights.
        path: The checkpoint; its own directory is used if it can be written.

    Returns:
        The file.

    Raises:
        ModelLoadError: Neither that nor the cache can be written.
    """
    in_cache = cache_folder() / f"{calibration.facts.fingerprint}.safetensors"
    problem: OSError | None = None
    for file in (path / FILE_NAME, in_cache):
        try:
            write_calibration(calibration, file)
        except OSError as error:
            log.info("calibration_not_written", file=str(file), reason=str(error))
            problem = error
            continue
        return file
    raise ModelLoadError(
        f"the calibration can be written neither into {path} nor into "
        f"{in_cache.parent} ({problem}); set XDG_CACHE_HOME to a directory that can "
        "be written, or name a file with --output"
    )
