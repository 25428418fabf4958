"""The mark of a registry of adapters tells changes of it, and their loss. Pure.

`<epoch>:<number>`: each change counts on; without a mark a new epoch begins.
"""

import secrets

from .errors import ProtocolError


def next_mark(mark: bytes | None) -> str:
    """Returns the mark after a change.

    Args:
        mark: That before; None where there is none.

    Raises:
        ProtocolError: It is none of ours.
    """
    if mark is None:
        return f"{secrets.token_hex(8)}:1"
    epoch, number = parted(mark)
    return f"{epoch}:{number + 1}"


def is_lost(seen: bytes, found: bytes | None) -> bool:
    """Whether Redis has forgotten changes between two looks at a registry.

    Args:
        seen: The mark at the look before.
        found: As it is now.
    """
    if found is None:
        return True
    (epoch, number), (now, reached) = parted(seen), parted(found)
    return epoch != now or reached < number


def parted(mark: bytes) -> tuple[str, int]:
    """Returns epoch and number of a mark.

    Raises:
        ProtocolError: It is none of ours.
    """
    epoch, _, number = mark.decode(errors="replace").partition(":")
    if not number.isascii() or not number.isdigit():
        raise ProtocolError(
            f"{mark[:40]!r} is no mark of adapters, <epoch>:<number>; delete the key "
            "tm:adapters-mark:<model>, and another is made"
        )
    return epoch, int(number)
