"""What SQLite refuses, as errors of ours: a full disk is not a damaged index."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...shared.errors import BulkOutputFailed, BulkRunConflict


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Translates what SQLite says of an index; a `with` block, or a decorator.

    Args:
        path: The index.

    Raises:
        BulkOutputFailed: The system refuses to read or write it.
        BulkRunConflict: It is damaged, or no index.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        raise BulkOutputFailed(
            f"{path} cannot be written: {error}; what was recorded stays, so run the "
            "same command again once that is mended"
        ) from error
    except sqlite3.DatabaseError as error:
        raise BulkRunConflict(
            f"{path} is damaged or not an index ({error}); --restart begins again"
        ) from None
