"""Finding a run by its id, or by the output that it writes."""

import contextlib
import sqlite3
from pathlib import Path

import msgspec

from ...shared.bulk.keys import RUN_ID
from ...shared.errors import UnknownRun
from .place import Place


def run_named(name: str) -> str:
    """Returns the id of a run.

    Args:
        name: The id itself, or the path of an output with its index beside it.

    Raises:
        UnknownRun: It is neither.
    """
    if RUN_ID.fullmatch(name):
        return name
    found = _run_beside(Place(Path(name)))
    if found is None:
        raise UnknownRun(
            f"'{name[:200]}' is no run, and no output of a bulk command either; "
            "expected an id as `tokenmill bulk list` shows it, or the path of an output"
        )
    return found


def _run_beside(place: Place) -> str | None:
    """Reads the index without touching it: its command may be running."""
    if not place.index.exists():
        return None
    uri = f"{place.index.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        try:
            row = db.execute("SELECT value FROM facts WHERE name='run'").fetchone()
        except sqlite3.DatabaseError:
            return None
    return None if row is None else msgspec.json.decode(row[0], type=str)
