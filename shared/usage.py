"""What tenants have used; `lua/lib/usage.lua` counts it as jobs end."""

import datetime as dt
from typing import Final

import msgspec

from .script_endings import moment

DAY_MS: Final = 86_400_000
_NUMBERS: Final = 6


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant used of one model on one day.

    A job counts once, on the day of its end. Prompt tokens are those of jobs that were
    started, output tokens all that were produced, also for jobs that did not succeed.
    """

    day: str
    """As 2030-01-31, by the clock of Redis, in UTC."""
    tenant: str
    model: str
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def jobs(self) -> int:
        """All that ended."""
        return self.succeeded + self.failed + self.cancelled + self.expired


def day_of(milliseconds: int) -> int:
    """Returns the day of a moment: days since 1970, in UTC."""
    return milliseconds // DAY_MS


def date_of(day: int) -> str:
    """Returns a day as people write it: 2030-01-31."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()


def field_of(day: int, tenant: str) -> str:
    """Returns the field of the hash `usage`."""
    return f"{day}:{tenant}"


def day_and_tenant(field: str) -> tuple[int, str] | None:
    """Takes a field apart; None for one that the scripts did not write."""
    day, colon, tenant = field.partition(":")
    good = colon and day.isascii() and day.isdigit() and len(day) <= 6
    return (int(day), tenant) if good else None


def numbers_of(value: str) -> tuple[int, ...]:
    """Returns the six numbers of a field's value; what is no number is 0."""
    parts = value.split()[:_NUMBERS]
    counts = [moment(part) or 0 for part in parts]
    return (*counts, *(0 for _ in range(_NUMBERS - len(counts))))


def row_of(day: int, tenant: str, model: str, numbers: tuple[int, ...]) -> UsageRow:
    """Returns what a field says."""
    succeeded, failed, cancelled, expired, prompt, completion = numbers
    return UsageRow(
        day=date_of(day),
        tenant=tenant,
        model=model,
        succeeded=succeeded,
        failed=failed,
        cancelled=cancelled,
        expired=expired,
        prompt_tokens=prompt,
        completion_tokens=completion,
    )
