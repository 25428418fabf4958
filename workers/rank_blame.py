"""Whose fault it is that a group falls: ranks fail together, and one has begun it."""

from collections.abc import Sequence
from typing import Final, Protocol

from ..shared.errors import GroupLost
from .rank_reports import Failed

BLAME_S: Final = 0.5
"""When one rank is lost the others fail with it: so long the cause is waited for."""


class Accused(Protocol):
    """What is asked of a follower."""

    @property
    def name(self) -> str:
        """The rank in words."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether it runs and has told of no failure."""
        ...


class Blame:
    """Finds the cause among what ranks tell of their failures.

    Args:
        followers: All of the group.
    """

    def __init__(self, followers: Sequence[Accused]) -> None:
        self._followers = followers
        self._heard_at: float | None = None
        self._account = ""
        self._misses_another = False
        """The account is of a rank that waited in vain, and does not know for which."""

    def hear(self, follower: Accused, report: Failed, now: float) -> None:
        """Keeps the first account, unless a later one is of a rank's own fault.

        Args:
            follower: Whose account it is.
            report: What it says.
            now: Seconds, of a clock that never goes back.
        """
        misses_another = report.code == GroupLost.code
        if self._heard_at is None:
            self._heard_at = now
        elif misses_another or not self._misses_another:
            return
        self._account = f"{follower.name}: {report.message}"
        self._misses_another = misses_another

    def verdict(self, now: float | None = None) -> str | None:
        """Returns the cause; None where no rank has told of a failure.

        Args:
            now: A cause may still turn up for a while after the first account; None:
                nobody is left to name another.
        """
        if self._heard_at is None:
            return None
        if now is not None and now <= self._heard_at + BLAME_S:
            return None
        if self._misses_another:
            return self.naming_the_silent(self._account)
        return self._account

    def naming_the_silent(self, reason: str) -> str:
        """Adds to what those say who wait for a rank the only one that says nothing.

        Args:
            reason: As they put it.
        """
        silent = [one.name for one in self._followers if one.is_silent]
        if len(silent) != 1:
            return reason
        return f"{silent[0]} did not answer the others: {reason}"
