"""Ids of a run's jobs: deterministic, so that enqueueing may be repeated, and
self-describing, so that a terminal event names its run without a look-up.
"""

import re
from typing import Final

import msgspec

from ..errors import InvalidRequest
from ..keys import JobId, partition_of

MOST_SEQ: Final = 36**7 - 1
"""Items of a run are numbered from 0 to this."""
MOST_GENERATION: Final = 36**2 - 1
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_UNIQUE: Final = re.compile(
    r"b(?P<run>[a-z0-9]{10})(?P<seq>[0-9a-z]{7})(?P<generation>[0-9a-z]{2})"
    r"(?P<level>[0-9a-z])(?P<index>[0-9a-z]{4})"
)
"""25 characters; those of other jobs have 31."""


class Place(msgspec.Struct, frozen=True, order=True):
    """Which job of which item of which run."""

    run: str
    seq: int
    generation: int
    level: int = 0
    index: int = 0

    @property
    def unique(self) -> str:
        """The unique part of the job's id.

        Raises:
            InvalidRequest: A number is beyond what an id can hold.
        """
        return "".join(
            (
                *("b", self.run, _base36("seq", self.seq, 7)),
                _base36("generation", self.generation, 2),
                _base36("level", self.level, 1),
                _base36("index", self.index, 4),
            )
        )

    def job_id(self, model: str, tenant: str, partitions: int) -> JobId:
        """Returns the id of the job.

        Args:
            model: The model's public name.
            tenant: The run's tenant.
            partitions: How many the pool has.
        """
        unique = self.unique
        return JobId(model, partition_of(tenant, unique, partitions), unique)

    @property
    def node(self) -> str:
        """`<level>:<index>`, as in the names of an item's fields."""
        return f"{self.level}:{self.index}"


def place_of(job_id: str) -> Place | None:
    """Returns which job of which run this is, or None for a job of no run."""
    match = _UNIQUE.fullmatch(job_id.rpartition(".")[2])
    if match is None:
        return None
    return Place(
        run=match["run"],
        seq=int(match["seq"], 36),
        generation=int(match["generation"], 36),
        level=int(match["level"], 36),
        index=int(match["index"], 36),
    )


def _base36(what: str, number: int, width: int) -> str:
    if not 0 <= number < 36**width:
        raise InvalidRequest(
            what, f"{number} is out of range; expected 0 to {36**width - 1}"
        )
    digits = ""
    for _ in range(width):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
