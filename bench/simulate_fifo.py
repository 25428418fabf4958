"""The baseline: first in, first out, to the least loaded group that has room."""

import heapq

from tokenmill.scheduler.rooms import Room
from tokenmill.scheduler.snapshot import Assignment, Batch, Plan, Snapshot
from tokenmill.shared.messages import JobClass

PROBES = 8
"""Groups that the first job is offered to before it holds up the rest."""


def fifo(snapshot: Snapshot, _now_ms: int) -> Plan:
    """Gives jobs in the order given, all alike; knows no class and no tenant."""
    rooms = [Room(v, lends=False) for v in snapshot.groups if v.free_running > 0]
    heap = [(room.load, room.view.group, i) for i, room in enumerate(rooms)]
    heapq.heapify(heap)
    batches: dict[tuple[str, JobClass, str], list[Assignment]] = {}
    for job in snapshot.jobs:
        passed, placed = [], False
        while heap and not placed and len(passed) < PROBES:
            entry = heapq.heappop(heap)
            room = rooms[entry[2]]
            if room.fits(job):
                key = (room.view.group, job.job_class, job.bucket)
                batches.setdefault(key, []).append(room.take(job))
                entry, placed = (room.load, entry[1], entry[2]), True
            passed.append(entry)
        for entry in passed:
            if rooms[entry[2]].running > 0:
                heapq.heappush(heap, entry)
        if not placed:
            break
    return Plan(
        batches=tuple(
            Batch(group=group, job_class=kind, bucket=bucket, assignments=tuple(jobs))
            for (group, kind, bucket), jobs in batches.items()
        )
    )
