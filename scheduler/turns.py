"""Turns of those who would be passed over: suspects and pushed-out bulk. Pure.

A suspect has lost several leases and may have killed its workers: it runs alone, so
that no neighbour pays for it. Bulk that was pushed out goes on inside its group as soon
as interactive work leaves room there; when it leaves none for long, no more is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ..shared.messages import JobClass
from .packing import MAX_RESERVATIONS, Packer
from .rooms import Room
from .snapshot import Fairness, GroupView, WaitingJob

RESERVE_AFTER_MS: Final = 2_000
"""A job that fits nowhere for this long gets a group kept free for it."""
BULK_PATIENCE_MS: Final = 30_000
"""Bulk that waited this long behind interactive work gets a turn now and then."""
BULK_SHARE: Final = 16
"""One part in this many of the tokens, or of the groups, goes to impatient bulk."""
BULK_TURN_MS: Final = BULK_PATIENCE_MS // (BULK_SHARE - 1)
"""Pushed-out bulk that has its room back keeps it for this long."""


def place_suspects(
    suspects: Sequence[WaitingJob],
    packer: Packer,
    groups: Sequence[GroupView],
    now_ms: int,
) -> list[WaitingJob]:
    """Gives suspects an empty group each, or keeps the emptiest one free for them.

    Interactive ones come first, then the nearest deadline, then the oldest. At most
    half of the groups run or wait for a suspect, so that ordinary work goes on in the
    others; in a pool of one, the caller makes them take turns.

    Args:
        suspects: Waiting jobs that are to run alone.
        packer: What this plan has left of the groups.
        groups: All live groups.
        now_ms: The clock of Redis.

    Returns:
        The suspects that were given a group.
    """
    given: list[WaitingJob] = []
    if not suspects:
        return given
    left = max(1, len(groups) // 2) - sum(bool(group.alone) for group in groups)
    reserved = 0
    for job in sorted(suspects, key=_suspect_order):
        if left <= 0 or reserved >= MAX_RESERVATIONS:
            break
        able = _able(job, packer)
        room = min(
            (room for room in able if room.fits(job)), key=_quickest, default=None
        )
        if room is not None:
            packer.give(room, job)
            given.append(job)
        elif able and now_ms - job.enqueued_ms >= RESERVE_AFTER_MS:
            max(able, key=_emptiest).reserved = True
            reserved += 1
        else:
            continue
        left -= 1
    return given


def _suspect_order(job: WaitingJob) -> tuple[bool, float, int, str]:
    due = float("inf") if job.deadline_ms is None else job.deadline_ms
    return job.job_class is JobClass.BULK, due, job.enqueued_ms, job.id


def _able(job: WaitingJob, packer: Packer) -> list[Room]:
    """Groups that could hold the job when empty; of its own length class if any."""
    able = [
        room
        for room in packer.rooms
        if not (room.closed or room.reserved) and room.view.could_hold(job)
    ]
    homes = (packer.length(job), "any")
    return [room for room in able if room.view.serves in homes] or able


def _quickest(room: Room) -> tuple[float, str]:
    return room.view.step_ms, room.view.group


def _emptiest(room: Room) -> tuple[float, int, str]:
    view = room.view
    return room.running / max(view.max_running, 1), room.blocks, view.group


class BulkTurns(msgspec.Struct, frozen=True):
    """Where pushed-out bulk stands."""

    groups: frozenset[str]
    """Groups in which interactive jobs may not take what bulk holds."""
    pushed_ms: Mapping[str, int]
    """Since when each group's bulk has been pushed out, its turn included."""
    restored_ms: Mapping[str, int]
    """Of these, since when it has had its room back."""


def bulk_turns(
    groups: Sequence[GroupView], fairness: Fairness, now_ms: int
) -> BulkTurns:
    """Finds the groups whose pushed-out bulk is to have its room back now.

    The engine cannot do it: there bulk never goes before interactive work, and starts
    as soon as this leaves it room.

    Args:
        groups: The live groups.
        fairness: What earlier plans remembered.
        now_ms: The clock of Redis.
    """
    pushed: dict[str, int] = {}
    restored: dict[str, int] = {}
    for group in groups:
        if group.bulk_running <= 0:
            continue
        name = group.group
        since = fairness.pushed_ms.get(name, now_ms)
        if group.free_running >= 0 and group.free_blocks >= 0:
            if now_ms - since < BULK_PATIENCE_MS:
                continue
            back = fairness.restored_ms.get(name, now_ms)
            if now_ms - back >= BULK_TURN_MS:
                continue
            restored[name] = back
        pushed[name] = since
    due = sorted(
        (since, name)
        for name, since in pushed.items()
        if now_ms - since >= BULK_PATIENCE_MS
    )
    most = max(1, len(groups) // BULK_SHARE)
    chosen = frozenset(name for _, name in due[:most])
    return BulkTurns(chosen, pushed, restored)
