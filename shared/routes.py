"""Which version of a model a job goes to: shares of all jobs, told by a job's id. Pure.

A model without a route is served by whatever groups it has. With one, a job without a
pin goes to the version that its id falls to; a version without a share gets none.
"""

import re
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import msgspec

from .errors import InvalidRequest, VersionConflict
from .messages import FIRST_VERSION
from .typed import shown

SLOTS: Final = 10_000
"""Ids fall into so many slots, a hundredth of a percent each."""
WHOLE: Final = 100.0
"""What shares sum to, in percent."""
VERSION_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,31}")
_EXACT: Final = 1e-6


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who gets new jobs of a model: field `route` of `tm:versions:<model>`."""

    v: int = FIRST_VERSION
    serial: int = 0
    """Rises with every change of the route or of a version."""
    shares: dict[str, float] = {}
    """Version -> percent of the jobs without a pin; 100 in all, or none at all."""
    previous: dict[str, float] = {}
    """The shares before the last switch, for the way back."""
    shadow: dict[str, float] = {}
    """Version -> percent of the traffic that is copied to it."""
    weights: dict[str, str] = {}
    """Version -> weights of those that serve or may serve again: jobs that were begun
    with them wait for them."""
    draining: tuple[str, ...] = ()
    """Versions that end: they take no new jobs, not even those for them alone."""
    retiring: bool = False
    """Whether the model ends: it takes no new jobs."""
    since: int = 0
    """Rises with every switch, by the clock of Redis: the larger is the newer, whatever
    Redis has lost. Below 0 where who served was only written down: the earlier holds.
    """
    restored_ms: int = 0
    """When it was last written again, after Redis had lost it."""
    changed_ms: int = 0
    """By the clock of Redis."""

    def version_of(self, job_id: str) -> str | None:
        """Returns the version that a job without a pin belongs to.

        Args:
            job_id: The job.

        Returns:
            None where no version has a share.
        """
        return Split(self.shares).of(job_id)


class Split:
    """Shares made ready for many jobs.

    Args:
        shares: Version -> percent; those of no share are left out.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.versions = tuple(sorted(name for name, part in shares.items() if part > 0))
        total = sum(shares[name] for name in self.versions) or 1.0
        sums = accumulate(shares[name] for name in self.versions)
        self._bounds = [round(SLOTS * part / total) for part in sums]

    def of(self, job_id: str) -> str | None:
        """Returns the version of a job: CRC-32 of its id, modulo 10,000.

        Of two versions in the order of their names, the second grows downwards, so
        that a job never changes sides in a gradual move in one direction.
        """
        if not self.versions:
            return None
        slot = zlib.crc32(job_id.encode()) % SLOTS
        place = min(bisect_right(self._bounds, slot), len(self.versions) - 1)
        return self.versions[place]


def check_version_name(name: str, field: str = "version") -> None:
    """Refuses what cannot be a version's name.

    Raises:
        InvalidRequest: Names the field and what is allowed.
    """
    if not VERSION_NAME.fullmatch(name):
        raise InvalidRequest(
            field,
            f"{shown(name)} cannot be a version's name; expected 1 to 32 letters, "
            "digits and . _ + -, beginning with a letter, a digit or _",
        )


def check_percent(version: str, percent: float) -> None:
    """Refuses what is no share of a version.

    Raises:
        InvalidRequest: It is not 0 to 100 in steps of 0.01.
    """
    steps = percent * SLOTS / WHOLE
    if not 0 <= percent <= WHOLE or abs(steps - round(steps)) > _EXACT:
        raise InvalidRequest(
            "share", f"{percent:g} of {version}; expected 0 to 100 in steps of 0.01"
        )


def check_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Returns shares without those of nobody.

    Args:
        shares: Version -> percent.

    Raises:
        InvalidRequest: One is no percentage in steps of 0.01, or they are not 100
            together.
    """
    for name, part in shares.items():
        check_version_name(name)
        check_percent(name, part)
    total = sum(shares.values())
    if abs(total - WHOLE) > _EXACT:
        raise InvalidRequest(
            "share",
            f"the shares {shown_shares(shares)} are {total:g} % together; expected 100",
        )
    return {name: part for name, part in shares.items() if part > 0}


def with_share(
    shares: Mapping[str, float], version: str, percent: float
) -> dict[str, float]:
    """Returns shares in which one version has so much, the others what is left.

    Args:
        shares: As they are; the others keep their proportions.
        version: Whose share is to be set.
        percent: 0 to 100.

    Raises:
        InvalidRequest: It is no percentage.
        VersionConflict: Nobody else could take the rest.
    """
    check_percent(version, percent)
    others = {n: part for n, part in shares.items() if n != version and part > 0}
    rest = SLOTS - round(percent * SLOTS / WHOLE)
    if rest and not others:
        raise VersionConflict(
            f"{version} is to have {percent:g} % and no other version has a share that "
            "could take the rest; switch to the one that is to have it instead: that "
            f"with {rest * WHOLE / SLOTS:g} %"
        )
    return check_shares({**apportioned(others, rest), version: percent})


def apportioned(parts: Mapping[str, float], slots: int = SLOTS) -> dict[str, float]:
    """Returns percents in the proportions of some parts, exact to the slot.

    Args:
        parts: Version -> its part, above 0.
        slots: Hundredths of a percent to divide.
    """
    total = sum(parts.values())
    exact = {name: slots * part / total for name, part in parts.items()}
    made = {name: int(part) for name, part in exact.items()}
    # What rounding down leaves goes where most was cut off.
    by_loss = sorted(exact, key=lambda name: (made[name] - exact[name], name))
    for name in by_loss[: slots - sum(made.values())]:
        made[name] += 1
    return {name: count * WHOLE / SLOTS for name, count in made.items()}


def who_serves(shares: Mapping[str, float]) -> str:
    """Returns who gets the jobs of a model, as people read it."""
    return shown_shares(shares) if shares else "any of its versions"


def shown_shares(shares: Mapping[str, float]) -> str:
    """Returns shares as people read them."""
    parts = (f"{name} {part:g} %" for name, part in sorted(shares.items()))
    return ", ".join(parts) or "nobody"
