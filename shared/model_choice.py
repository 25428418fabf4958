"""A model as it is named on a command line: a path, a hub id or a public name."""

from pathlib import Path

from .config import ModelConfig


def public_name(wanted: str) -> str:
    """Returns the name that a model is served under.

    A directory is served under its last part, a file under that without its ending,
    anything else as it is named.

    Args:
        wanted: What was given on the command line.
    """
    path = Path(wanted).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else wanted


def model_named(wanted: str) -> ModelConfig:
    """Returns a model with default settings for what a command line names.

    Args:
        wanted: A directory or file here, a hub id or a public name.
    """
    path = Path(wanted).expanduser()
    if path.exists():
        return ModelConfig(name=public_name(wanted), path=str(path.resolve()))
    return ModelConfig(name=wanted)
