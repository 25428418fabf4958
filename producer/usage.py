"""What tenants have used, read over all shards."""

from typing import Any, Final

from ..shared.errors import InvalidRequest, ProtocolError
from ..shared.keys import SHARDS, Keys, is_shard
from ..shared.usage import (
    UsageRow,
    day_and_tenant,
    day_of,
    field_of,
    numbers_of,
    row_of,
)
from ..shared.validate import TENANT
from .session import Session

MOST_DAYS: Final = 3660
"""Asked for at once; far longer than anything is kept."""
_PAGE: Final = 1000
_Counts = dict[tuple[int, str, str], list[int]]
"""By day, tenant and model, summed over partitions."""


async def usage(
    session: Session, tenant: str | None = None, days: int = 30
) -> list[UsageRow]:
    """Returns what was used, newest day first, then by tenant and model.

    Args:
        session: The client's connections.
        tenant: Of one tenant, or of all.
        days: How many days, today included, by the clock of Redis in UTC.

    Raises:
        InvalidRequest: `days` is out of range, or `tenant` cannot be one.
    """
    if not 1 <= days <= MOST_DAYS:
        raise InvalidRequest(
            "days", f"{days} is out of range; expected 1 to {MOST_DAYS}"
        )
    if tenant is not None and not TENANT.fullmatch(tenant):
        raise InvalidRequest("tenant", f"{tenant[:80]!r} cannot be a tenant")
    (seconds, _), members = await session.read(("TIME",), ("SMEMBERS", SHARDS))
    today = day_of(int(seconds) * 1000)
    wanted = range(today - days + 1, today + 1)
    names = sorted(member.decode(errors="replace") for member in members)
    counts: _Counts = {}
    for keys in (Keys.of_shard(name) for name in names if is_shard(name)):
        try:
            if tenant is None:
                await _add_all(session, keys, wanted, counts)
            else:
                await _add_tenant(session, keys, wanted, tenant, counts)
        except ProtocolError:
            continue  # a stranger's key in its place; `doctor` names it
    rows = [
        row_of(day, name, model, tuple(numbers))
        for (day, name, model), numbers in counts.items()
    ]
    rows.sort(key=lambda row: (row.tenant, row.model))
    return sorted(rows, key=lambda row: row.day, reverse=True)


async def _add_tenant(
    session: Session, keys: Keys, days: range, tenant: str, counts: _Counts
) -> None:
    """One field a day: what others have used is not read."""
    fields = [field_of(day, tenant) for day in days]
    (values,) = await session.read(("HMGET", keys.usage, *fields))
    for day, value in zip(days, values, strict=True):
        if value is not None:
            _add(counts, (day, tenant, keys.model), value)


async def _add_all(session: Session, keys: Keys, days: range, counts: _Counts) -> None:
    cursor: Any = 0
    seen: set[str] = set()
    while True:
        ((cursor, row),) = await session.read(
            ("HSCAN", keys.usage, cursor, "COUNT", _PAGE)
        )
        for name, value in row.items():
            field = name.decode(errors="replace")
            found = day_and_tenant(field)
            # A scan may show a field twice.
            if found is not None and found[0] in days and field not in seen:
                seen.add(field)
                _add(counts, (*found, keys.model), value)
        if not cursor:
            return


def _add(counts: _Counts, at: tuple[int, str, str], value: bytes) -> None:
    numbers = numbers_of(value.decode(errors="replace"))
    before = counts.setdefault(at, [0] * len(numbers))
    for index, number in enumerate(numbers):
        before[index] += number
