"""Finding a run by its id, or by the output that it writes."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Final

import msgspec

from ...shared.bulk.keys import RUN_ID
from ...shared.errors import UnknownRun
from .place import Place

_RUN: Final = "SELECT value FROM facts WHERE name='run'"


def run_named(name: str) -> str:
    """Returns the id of a run.

    Args:
        name: The id itself, or the path of an output with its index beside it.

    Raises:
        UnknownRun: It is neither.
    """
    if RUN_ID.fullmatch(name):
        return name
    found = run_beside(Place(Path(name)))
    if found is None:
        raise UnknownRun(
            f"'{name[:200]}' is no run, and no output of a bulk command either; "
            "expected an id as `tokenmill bulk list` shows it, or the path of an output"
        )
    return found


def run_beside(place: Place) -> str | None:
    """Returns the run that an output is of, or None.

    Args:
        place: The output. Its index is read without touching it: its command may be
            running.
    """
    if not place.index.exists():
        return None
    # On a disk that is only read there is no room for what SQLite puts beside a file
    # that may change; there it does not change.
    for how in ("mode=ro", "immutable=1"):
        uri = f"{place.index.absolute().as_uri()}?{how}"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
                row = db.execute(_RUN).fetchone()
        except sqlite3.OperationalError as error:
            if how == "mode=ro" and "no such table" not in str(error):
                continue
            return None
        except sqlite3.DatabaseError:
            return None
        return None if row is None else msgspec.json.decode(row[0], type=str)
    return None
