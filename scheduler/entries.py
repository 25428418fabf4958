"""Entries of the waiting streams, as any client may have written them."""

from collections.abc import Mapping
from typing import Final

import msgspec

from ..shared.errors import ProtocolError, UnknownJob
from ..shared.keys import JobId, Keys
from ..shared.messages import JobClass
from ..shared.validate import MAX_PRIORITY, TENANT

_MOST: Final = 2**53
"""Numbers beyond this are no milliseconds, bytes or tokens."""
_LONGEST_ID: Final = 256
_LONGEST_WEIGHTS: Final = 256


class Stream(msgspec.Struct, frozen=True):
    """One stream of waiting jobs."""

    key: str
    job_class: JobClass | None
    """None for `resume`, whose entries name their class."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One waiting job as its stream describes it."""

    job_id: str
    stream: str
    entry_id: str
    job_class: JobClass
    priority: int
    tenant: str
    deadline_ms: int | None
    num_bytes: int
    enqueued_ms: int
    resumed: bool
    started: bool = False
    """Its client has had tokens of it."""
    losses: int = 0
    """Workers lost while they ran it, or leases that ended otherwise."""
    weights: str = ""
    """What its output was begun with."""


def lane_stream(keys: Keys, member: bytes) -> Stream | None:
    """Returns the stream of a member of `lanes`, or None when it names no lane.

    Args:
        keys: The shard's names.
        member: `<class>:<bucket>:<lane>`.
    """
    parts = member.decode(errors="replace").split(":")
    if len(parts) != 3 or parts[0] not in set(JobClass):
        return None
    lane = parts[2]
    if not (lane.isascii() and lane.isdigit() and lane == str(int(lane[:9]))):
        return None
    return Stream(keys.queue(parts[0], parts[1], int(parts[2])), JobClass(parts[0]))


def named(fields: Mapping[bytes, bytes]) -> str:
    """Returns the job that an entry names, whatever else is wrong with it; '' if none.

    Ids that no enqueue lets in are not looked for.
    """
    raw = fields.get(b"id", b"")
    return raw.decode() if raw.isascii() and len(raw) <= _LONGEST_ID else ""


def parse_entry(
    keys: Keys,
    stream: Stream,
    entry_id: bytes,
    fields: Mapping[bytes, bytes],
    now_ms: int,
) -> Entry:
    """Reads one entry.

    Args:
        keys: Names of the shard it was found in.
        stream: Where it stands.
        entry_id: Its stream id.
        fields: Its fields.
        now_ms: The clock of Redis: no entry is from the future.

    Raises:
        ProtocolError: A field is missing or cannot be what it should be.
    """
    job_id = _job_id(fields, keys)
    job_class = stream.job_class or _job_class(fields)
    tenant = _text(fields, b"tenant")
    if not TENANT.fullmatch(tenant):
        raise ProtocolError(f"field tenant: '{tenant[:80]}' cannot be a tenant")
    deadline = fields.get(b"deadline", b"")
    return Entry(
        job_id=job_id,
        stream=stream.key,
        entry_id=entry_id.decode(),
        job_class=job_class,
        # A former release that puts a job back leaves out what its record leaves out.
        priority=_number(fields, b"priority", -MAX_PRIORITY, MAX_PRIORITY)
        if fields.get(b"priority") != b""
        else 0,
        tenant=tenant,
        deadline_ms=_number(fields, b"deadline", 0, _MOST) if deadline else None,
        num_bytes=_number(fields, b"bytes", 0, _MOST) if b"bytes" in fields else 0,
        enqueued_ms=min(_waits_since(fields, entry_id), now_ms),
        resumed=stream.job_class is None,
        started=stream.job_class is None and fields.get(b"started") == b"1",
        losses=_number(fields, b"losses", 0, _MOST) if b"losses" in fields else 0,
        weights=_weights(fields) if stream.job_class is None else "",
    )


def _job_id(fields: Mapping[bytes, bytes], keys: Keys) -> str:
    job_id = _text(fields, b"id")
    try:
        parsed = JobId.parse(job_id)
    except UnknownJob as error:
        raise ProtocolError(f"field id: {error}") from None
    if parsed.model != keys.model or parsed.partition != keys.partition:
        raise ProtocolError(
            f"field id: job {job_id} belongs to another shard than {keys.shard}"
        )
    return job_id


def _job_class(fields: Mapping[bytes, bytes]) -> JobClass:
    name = _text(fields, b"class")
    try:
        return JobClass(name)
    except ValueError:
        raise ProtocolError(
            f"field class: '{name[:80]}'; expected interactive or bulk"
        ) from None


def _weights(fields: Mapping[bytes, bytes]) -> str:
    """What the output was begun with; '' also where a stranger wrote something else."""
    raw = fields.get(b"weights", b"")
    return raw.decode() if raw.isascii() and len(raw) <= _LONGEST_WEIGHTS else ""


def _waits_since(fields: Mapping[bytes, bytes], entry_id: bytes) -> int:
    """When the job began to wait: redelivered ones keep the time of their enqueue."""
    raw = fields.get(b"enqueued_ms", b"")
    if raw.isdigit() and len(raw) < 16:
        return int(raw)
    return int(entry_id.partition(b"-")[0])


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    try:
        return fields[name].decode()
    except KeyError:
        raise ProtocolError(f"field {name.decode()} is missing") from None
    except UnicodeDecodeError:
        raise ProtocolError(f"field {name.decode()} is not UTF-8") from None


def _number(fields: Mapping[bytes, bytes], name: bytes, least: int, most: int) -> int:
    raw = fields.get(name)
    if raw is None:
        raise ProtocolError(f"field {name.decode()} is missing")
    try:
        value = int(raw) if len(raw) <= 20 else most + 1
    except ValueError:
        value = most + 1
    if not least <= value <= most:
        raise ProtocolError(
            f"field {name.decode()}: {raw[:40]!r}; expected a whole number from "
            f"{least} to {most}"
        )
    return value
