"""Names of objects in the store of files, and what each is of."""

import re
from typing import Final, NamedTuple

from ...shared.errors import StorageUnavailable
from ...shared.validate import TENANT

PROBE: Final = ".probe-"
"""Begins names of objects that tell the store's time and are removed at once."""
_NAME: Final = re.compile(
    rf"(?:{TENANT.pattern})/[a-z]+[-_][0-9a-f]{{24,40}}(?:/[0-9a-z-]{{1,80}})?"
)
"""`<tenant>/<id>` and `<tenant>/<id>/<part>`: nothing that leads elsewhere."""
_OURS: Final = re.compile(
    rf"(?:{TENANT.pattern})/(?:(?P<file>file-[0-9a-f]{{32}})"
    r"|(?P<part>batch_[0-9a-f]{32})/[0-9a-z-]{1,80})(?:\.[0-9a-f]{8}\.part)?"
    rf"|{re.escape(PROBE)}(?P<probe>[0-9a-f]{{16}})"
)


class Leftover(NamedTuple):
    """What an object is of; without that it is of no use."""

    kind: str
    """file, part or probe."""
    id: str
    """Of the file or batch."""


def leftover(name: str) -> Leftover | None:
    """Returns what an object is of, by its name; None: no gateway wrote it."""
    found = _OURS.fullmatch(name)
    if found is None or found.lastgroup is None:
        return None
    return Leftover(found.lastgroup, found[found.lastgroup])


def checked(name: str) -> str:
    """Returns a name that leads nowhere else.

    Raises:
        StorageUnavailable: It cannot be that of an object.
    """
    if not _NAME.fullmatch(name):
        raise StorageUnavailable(f"{name[:120]!r} cannot be the name of an object")
    return name
