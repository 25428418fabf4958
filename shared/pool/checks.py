"""Checks that `tokenmill doctor` runs for folders that `shared` must not know."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import Config
    from ..redis import Finding

Check = Callable[["Config"], list["Finding"]]

_CHECKS: list[Check] = []


def register_check(check: Check) -> None:
    """Adds a check of facts that `shared` does not know, such as a worker's kernels.

    Args:
        check: Called with the settings in force when `doctor` runs; imports what it
            needs then.
    """
    if check not in _CHECKS:
        _CHECKS.append(check)


def registered_checks() -> tuple[Check, ...]:
    """Returns all checks, in the order of their registration."""
    return tuple(_CHECKS)
