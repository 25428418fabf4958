"""Everything a chaos run left in Redis and in the journals, read once."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import redis
from chaos_journal import Line, lines
from chaos_model import MODEL
from chaos_plan import STREAMERS

from tokenmill.shared.keys import Keys
from tokenmill.shared.permanent_keys import is_permanent

KEYS = Keys(MODEL, 0)
TERMINAL = ("succeeded", "failed", "cancelled", "expired")
_CHUNK = 500

Fields = dict[str, str]
Entry = tuple[str, Fields]
"""Of a stream."""


@dataclass
class JobTruth:
    """One job as Redis has it."""

    record: dict[str, str]
    result: dict[str, Any] | None = None
    log: list[tuple[str, dict[str, Any] | None]] = field(default_factory=list)
    """(entry id, delta or None for a fence)."""


@dataclass
class Truth:
    """All of it."""

    jobs: dict[str, JobTruth]
    ends: dict[str, list[str]]
    """Job id -> states in the stream of terminal events."""
    submitted: dict[int, set[str]]
    """Job number -> ids that its producer was given."""
    streams: dict[tuple[int, int], list[Line]]
    """(subscriber, job number) -> its journal."""
    starts: dict[int, list[float]]
    """Subscriber -> times at which an incarnation of it began."""
    errors: list[str]
    """What client processes saw and should not have."""


def connect(port: int) -> "redis.Redis":
    """A client of the bench's own, past the proxy."""
    return redis.Redis(port=port, decode_responses=True, socket_timeout=10)


def read_truth(client: "redis.Redis", directory: Path) -> Truth:
    """Reads Redis and the journals."""
    ends: dict[str, list[str]] = defaultdict(list)
    for _, event in cast("list[Entry]", client.xrange(KEYS.done)):
        ends[event["id"]].append(event["state"])
    submitted: dict[int, set[str]] = defaultdict(set)
    streams: dict[tuple[int, int], list[Line]] = defaultdict(list)
    starts: dict[int, list[float]] = defaultdict(list)
    errors: list[str] = []
    for path in sorted(directory.glob("*.jsonl")):
        part, which = (
            path.stem,
            int(path.stem.rpartition("-")[2] or 0) if ("-" in path.stem) else 0,
        )
        for line in lines(path):
            if "error" in line:
                errors.append(f"job {line['n']} in {part}: {line['error']}")
            elif "start" in line:
                starts[which].append(line["start"])
            elif part.startswith("producer"):
                submitted[line["n"]].add(line["id"])
            elif part.startswith("subscriber"):
                streams[which, line["n"]].append(line)
    assert all(which < STREAMERS for which, _ in streams)
    return Truth(_jobs(client), ends, submitted, streams, starts, errors)


def _jobs(client: "redis.Redis") -> dict[str, JobTruth]:
    start = len(KEYS.job(""))
    ids = [name[start:] for name in client.scan_iter(KEYS.job("*"), count=1000)]
    jobs: dict[str, JobTruth] = {}
    for first in range(0, len(ids), _CHUNK):
        some = ids[first : first + _CHUNK]
        pipe = client.pipeline(transaction=False)
        for job_id in some:
            pipe.hgetall(KEYS.job(job_id))
            pipe.get(KEYS.output(job_id))
            pipe.xrange(KEYS.log(job_id))
        replies = pipe.execute()
        for number, job_id in enumerate(some):
            record, result, log = replies[3 * number : 3 * number + 3]
            jobs[job_id] = JobTruth(
                record,
                None if result is None else json.loads(result),
                [(i, json.loads(f["d"]) if "d" in f else None) for i, f in log],
            )
    return jobs


def leaked_keys(client: "redis.Redis") -> list[str]:
    """Keys without expiry that are not permanent."""
    names = [n for n in client.scan_iter(count=1000) if not is_permanent(n)]
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.pttl(name)
    return [n for n, ttl in zip(names, pipe.execute(), strict=True) if ttl == -1]


def books(client: "redis.Redis") -> list[str]:
    """What is not as it must be in an idle shard: counters, leases, credit."""
    wrong = []
    for field_name, value in cast("Fields", client.hgetall(KEYS.load)).items():
        counts = field_name in ("jobs", "tokens", "bytes")
        counts |= field_name.startswith(("class:", "tenant:"))
        if counts and field_name.endswith(("jobs", "tokens", "bytes")) and value != "0":
            wrong.append(f"load counts {field_name} = {value} though nothing waits")
    for name in ("lease", "deadline", "delayed"):
        left = cast("list[str]", client.zrange(f"{KEYS.prefix}{name}", 0, 4))
        wrong += [f"{name} still holds {job_id}" for job_id in left]
    streams = [KEYS.resume, *client.scan_iter(f"{KEYS.prefix}q:*")]
    streams += client.scan_iter(KEYS.work("*"))
    wrong += [f"{s} has {n} entries" for s in streams if (n := client.xlen(s))]
    for name in client.scan_iter(KEYS.group("*")):
        wrong += _credit(name, cast("Fields", client.hgetall(name)))
    return wrong


def _credit(name: str, group: dict[str, str]) -> list[str]:
    pairs = (
        ("credit_blocks", "total_blocks"),
        ("credit_running", "max_running"),
        ("credit_tokens", "batch_tokens"),
    )
    wrong = [
        f"{name}: {credit} is {group.get(credit)} of {group.get(total)}"
        for credit, total in pairs
        if group.get(credit) != group.get(total)
    ]
    held = ("bulk_blocks", "bulk_running", "bulk_tokens", "alone")
    return wrong + [
        f"{name}: {what} is {group[what]} though nothing runs"
        for what in held
        if group.get(what, "0") not in ("0", "")
    ]
