"""The root of all errors, and how a kind has its code and exit status."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class TokenmillError(Exception):
    """Root of the tree: catch this to catch everything tokenmill raises."""

    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1
    enqueued: tuple[str, ...] = ()
    """Ids of the jobs that a call for many had enqueued before this error."""
    refused: "Mapping[int, TokenmillError]" = MappingProxyType({})
    """Position in a call for many -> why that job was not enqueued; the others were,
    unless the whole call broke off."""

    def __init_subclass__(cls, code: str = "", exit_code: int = 0) -> None:
        """Takes `code` and `exit_code` of a kind; those not given are its parent's."""
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.exit_code = exit_code or cls.exit_code
