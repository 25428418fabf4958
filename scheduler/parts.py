"""Plans of a model whose versions have shares: one for each version. Pure.

What waits for one version then holds up nobody of another: not in the order of tenants,
not by a group kept free, not in the turns of bulk or of suspects.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from ..shared.shadow_keys import SHADOW_TENANT
from .policy import plan
from .rooms import Shapes
from .snapshot import Fairness, GroupView, Plan, Snapshot, WaitingJob

WHOLE: Final = ""
"""Names the one part of a model without shares."""
Memory = Mapping[str, Fairness]
"""What the plans of each part remember."""


def plan_parts(
    snapshot: Snapshot, shares: Mapping[str, float], before: Memory, now_ms: int
) -> tuple[Plan, Memory]:
    """Decides what is dispatched now.

    Args:
        snapshot: As for `plan`; its fairness is not looked at.
        shares: Version -> percent of the jobs without a pin; none: no version has one.
        before: What earlier plans of each part remembered.
        now_ms: The clock of Redis.

    Returns:
        The plans of all parts as one, and what to remember.
    """
    if not shares:
        made = plan(replace(snapshot, fairness=_of(before, WHOLE)), now_ms)
        return made, {WHOLE: made.fairness}
    parts = _Parts(snapshot.groups, shares)
    jobs = parts.jobs(snapshot.jobs)
    plans: list[Plan] = []
    after = {name: memory for name, memory in before.items() if name in parts.groups}
    for version, waiting in jobs.items():
        made = plan(
            replace(
                snapshot,
                jobs=tuple(waiting),
                groups=tuple(parts.groups[version]),
                fairness=_of(before, version),
                arrivals_per_s=snapshot.arrivals_per_s * shares.get(version, 0) / 100,
            ),
            now_ms,
        )
        after[version] = made.fairness
        plans.append(made)
    return _joined(plans), after


def _of(memory: Memory, part: str) -> Fairness:
    return memory.get(part) or Fairness()


def _joined(plans: Sequence[Plan]) -> Plan:
    waits = [made.wake_in_ms for made in plans if made.wake_in_ms is not None]
    return Plan(
        batches=tuple(batch for made in plans for batch in made.batches),
        wake_in_ms=min(waits, default=None),
        impossible=tuple(job_id for made in plans for job_id in made.impossible),
    )


class _Parts:
    """Groups by version, and to which of them each job goes.

    Args:
        groups: The live groups.
        shares: Version -> percent.
    """

    def __init__(
        self, groups: Sequence[GroupView], shares: Mapping[str, float]
    ) -> None:
        self.groups: dict[str, list[GroupView]] = {}
        self._of_need: dict[str, str] = {}
        for group in sorted(groups, key=lambda one: (one.version, one.group)):
            self.groups.setdefault(group.version, []).append(group)
            for need in group.offers:
                # Of versions with the same weights, the first in order of names.
                self._of_need.setdefault(need, group.version)
        self._shapes = {name: Shapes(views) for name, views in self.groups.items()}
        self._sharing = [name for name in sorted(shares) if name in self.groups]

    def jobs(self, waiting: Sequence[WaitingJob]) -> dict[str, list[WaitingJob]]:
        """Returns the jobs of each part; those that no group is for are in none."""
        found: dict[str, list[WaitingJob]] = {}
        copies: dict[str, list[WaitingJob]] = {}
        for job in waiting:
            version = self._of_need.get(job.needs)
            if version is None:
                continue
            if job.tenant == SHADOW_TENANT:
                copies.setdefault(version, []).append(job)
                continue
            shapes = self._shapes[version]
            large = job.tokens + job.max_tokens > shapes.sure_tokens
            if (large or job.choices > 1) and shapes.impossible(job):
                other, moved = self._elsewhere(version, job)
                found.setdefault(other, []).append(moved)
            else:
                found.setdefault(version, []).append(job)
        # A copy goes where nothing else waits: in order, turns and reservations it
        # would be one of the users' jobs.
        return {**copies, **found}

    def _elsewhere(self, version: str, job: WaitingJob) -> tuple[str, WaitingJob]:
        """Another version with a share for a job too large for its own, if it may."""
        for other, shapes in self._shapes.items():
            if shapes.could_hold(job):
                return other, job  # the same weights in another version
        if not job.version and not job.weights:
            for other in self._sharing:
                moved = replace(job, needs=f"={other}")
                if other != version and self._shapes[other].could_hold(moved):
                    return other, moved
        return version, job
