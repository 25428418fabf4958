"""What may be an output: a regular file that is no part of the input."""

import os
import stat
from pathlib import Path

from ...shared.errors import InvalidRequest
from .documents import is_document_name
from .place import Place


def check_named(name: str, field: str) -> None:
    """Refuses an empty name, which would be the present directory's.

    Args:
        name: Of the input or the output, as given.
        field: Which of them.

    Raises:
        InvalidRequest: It is empty.
    """
    if not name:
        raise InvalidRequest(field, "the name is empty; expected a path, or -")


def check_target(place: Place, source: Path | None) -> None:
    """Refuses an output that would destroy something, whatever else is asked for.

    Args:
        place: The output.
        source: The input; None for standard input.

    Raises:
        InvalidRequest: It is a directory, a device, a link, or (part of) the input.
    """
    for path in (place.output, place.partial):
        _check_kind(path)
        if source is not None:
            _check_apart(path, source)


def _check_kind(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing there; what cannot be reached is told when it is opened
    if stat.S_ISDIR(mode):
        raise InvalidRequest("output", f"{path} is a directory; name a file in it")
    if stat.S_ISLNK(mode) and not _leads_to_stream(path):
        raise InvalidRequest(
            "output",
            f"{path} is a symbolic link, which the output would replace; name the "
            f"file that it leads to, {path.resolve()}",
        )
    if not stat.S_ISREG(mode):
        raise _no_file(path)


def _leads_to_stream(path: Path) -> bool:
    """As /dev/stdout does, whatever that is, and what a shell makes of `>(…)`."""
    is_stream = path.is_fifo() or path.is_char_device() or path.is_socket()
    return is_stream or path.is_relative_to("/dev")


def _no_file(path: Path) -> InvalidRequest:
    return InvalidRequest(
        "output",
        f"{path} is no regular file, and lines are put in place by a rename; name a "
        "file, or use - for standard output",
    )


def _check_apart(path: Path, source: Path) -> None:
    if path.exists() and source.exists() and path.samefile(source):
        raise InvalidRequest(
            "output", f"{path} is the input itself; name another file for the output"
        )
    if source.is_dir() and _is_below(path, source) and is_document_name(path.name):
        raise InvalidRequest(
            "output",
            f"{path} would be read as a document of {source}; name a file outside of "
            "it, or one that ends in .jsonl",
        )


def _is_below(path: Path, directory: Path) -> bool:
    absolute = Path(os.path.realpath(path.parent))
    return absolute.is_relative_to(os.path.realpath(directory))
