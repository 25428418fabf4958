"""From entries to ready jobs and back. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from ..shared.keys import bucket_of
from .entries import Entry
from .preparing import Prepared
from .snapshot import WaitingJob
from .waiting import Ready

CHUNK_JOBS: Final = 256
"""Jobs fetched and tokenized at once."""
CHUNK_BYTES: Final = 256 * 1024
"""Payload of a chunk: the tokenizer's thread is not held longer by one class."""
_SUSPECT: Final = 1_000_000
"""Losses of a job that is known to run alone, whatever the bound is."""


def chunks(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yields runs of entries of bounded number and size.

    Args:
        entries: In order.
    """
    chunk: list[Entry] = []
    size = 0
    for entry in entries:
        full = len(chunk) >= CHUNK_JOBS or size + entry.num_bytes > CHUNK_BYTES
        if chunk and full:
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += entry.num_bytes
    if chunk:
        yield chunk


def ready_job(
    entry: Entry, size: Prepared, buckets: tuple[int, ...], isolate_after: int
) -> Ready:
    """Returns a job that can be dispatched.

    Args:
        entry: As its stream describes it.
        size: Its exact size.
        buckets: Upper bounds of the length buckets.
        isolate_after: Lost leases after which a job runs alone.
    """
    job = WaitingJob(
        id=entry.job_id,
        tokens=size.tokens,
        max_tokens=size.max_tokens,
        choices=size.choices,
        job_class=entry.job_class,
        bucket=bucket_of(size.tokens, buckets),
        priority=entry.priority,
        tenant=entry.tenant,
        enqueued_ms=entry.enqueued_ms,
        deadline_ms=entry.deadline_ms,
        schema=size.schema,
        started=entry.started,
        alone=entry.losses >= isolate_after,
        version=size.version,
        weights=entry.weights,
        tokenizer=size.tokenizer,
        adapter=size.adapter,
    )
    return Ready(job, size.token_ids, entry.stream, entry.entry_id, entry.resumed)


def entry_of(ready: Ready) -> Entry:
    """Returns the entry that a ready job was made of."""
    job = ready.job
    return Entry(
        job_id=job.id,
        stream=ready.stream,
        entry_id=ready.entry_id,
        job_class=job.job_class,
        priority=job.priority,
        tenant=job.tenant,
        deadline_ms=job.deadline_ms,
        num_bytes=len(ready.token_ids),
        enqueued_ms=job.enqueued_ms,
        resumed=ready.resumed,
        started=job.started,
        losses=_SUSPECT if job.alone else 0,
        weights=job.weights,
    )
