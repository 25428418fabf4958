"""The order in which waiting jobs of one class are served. Pure.

Within a tenant: urgency band, then due time. Between tenants: band, then the tokens
that each was given (weighted fair queueing in virtual time). Every step has a bound on
how long it can pass anyone over, so nothing starves:

- priority: a job rises by one for each second it waits, up to the most urgent band;
- a flood of one tenant: between tenants only the time counts for which a tenant got
  nothing at all, so that old jobs of a flood do not overtake a newcomer;
- everything else: whoever got nothing for `OVERDUE_MS` goes first.
"""

import heapq
from collections.abc import Iterable, Mapping
from typing import Final

from .snapshot import Fairness, WaitingJob

URGENT_MS: Final = 5_000
"""A job whose deadline is nearer than this is in the most urgent band."""
AGEING_MS: Final = 1_000
"""Waiting this long makes up for one step of priority."""
OVERDUE_MS: Final = 60_000
"""Due time of a job without deadline, and the longest that a tenant is passed over."""

_Key = tuple[int, float, float, str, str]


class FairQueue:
    """Waiting jobs of one class, served tenant by tenant.

    Args:
        jobs: The jobs.
        fairness: What earlier plans gave to whom.
        weights: Tenant -> share; 1 where absent.
        now_ms: The clock of Redis.
    """

    def __init__(
        self,
        jobs: Iterable[WaitingJob],
        fairness: Fairness,
        weights: Mapping[str, float],
        now_ms: int,
    ) -> None:
        self._now_ms = now_ms
        self._weights = weights
        self._served_at = fairness.served_at_ms
        self.clock = fairness.clock
        self.served: dict[str, float] = {}
        self.touched: set[str] = set()
        by_tenant: dict[str, list[WaitingJob]] = {}
        for job in jobs:
            by_tenant.setdefault(job.tenant, []).append(job)
        self._top = self._most_urgent_band(by_tenant)
        for tenant, waiting in by_tenant.items():
            # Whoever was away does not come back with a claim on the past.
            self.served[tenant] = max(fairness.served.get(tenant, 0.0), self.clock)
            waiting.sort(key=self._within_tenant, reverse=True)
        self._by_tenant = by_tenant
        self._heap: list[_Key] = []
        for tenant in by_tenant:
            self._offer(tenant)

    def pop(self) -> WaitingJob | None:
        """Removes and returns the next job; `settle` it before the next call."""
        if not self._heap:
            return None
        *_, tenant = heapq.heappop(self._heap)
        return self._by_tenant[tenant].pop()

    def settle(self, job: WaitingJob, *, given: bool) -> None:
        """Says whether the job just popped was given to a group.

        Args:
            job: The job.
            given: True charges its tenant; False leaves the accounts as they are.
        """
        if given:
            self.clock = max(self.clock, self.served[job.tenant])
            weight = max(self._weights.get(job.tenant, 1.0), 1e-6)
            cost = job.tokens + job.choices * job.max_tokens
            self.served[job.tenant] += cost / weight
            self.touched.add(job.tenant)
        self._offer(job.tenant)

    def _offer(self, tenant: str) -> None:
        """Enters the tenant with its best job."""
        waiting = self._by_tenant[tenant]
        if not waiting:
            return
        job = waiting[-1]
        passed_over = self._now_ms - job.enqueued_ms
        if tenant in self.touched:
            passed_over = 0
        elif tenant in self._served_at:
            since_service = self._now_ms - self._served_at[tenant]
            passed_over = min(passed_over, since_service)
        band = self._band(job, passed_over)
        account = self.served[tenant]
        if passed_over >= OVERDUE_MS:
            band, account = self._top - 1, 0.0
        heapq.heappush(self._heap, (band, account, self._due(job), job.id, tenant))

    def _most_urgent_band(self, by_tenant: Mapping[str, list[WaitingJob]]) -> int:
        jobs = [job for waiting in by_tenant.values() for job in waiting]
        top = min((job.priority for job in jobs), default=0)
        return top - 1 if any(map(self._is_urgent, jobs)) else top

    def _is_urgent(self, job: WaitingJob) -> bool:
        deadline = job.deadline_ms
        return deadline is not None and deadline - self._now_ms <= URGENT_MS

    def _band(self, job: WaitingJob, waited_ms: int) -> int:
        if self._is_urgent(job):
            return self._top
        return max(self._top, job.priority - max(waited_ms, 0) // AGEING_MS)

    def _due(self, job: WaitingJob) -> float:
        due = job.enqueued_ms + OVERDUE_MS
        return due if job.deadline_ms is None else min(due, job.deadline_ms)

    def _within_tenant(self, job: WaitingJob) -> tuple[int, float, int, str]:
        band = self._band(job, self._now_ms - job.enqueued_ms)
        return band, self._due(job), job.enqueued_ms, job.id


def remember(
    before: Fairness,
    queues: Iterable[FairQueue],
    *,
    since_bulk: int,
    now_ms: int,
) -> Fairness:
    """Returns the accounts after a plan.

    Tenants that are not ahead of the virtual clock are forgotten: they would start
    at the clock anyway.
    """
    queues = tuple(queues)
    clock = max((queue.clock for queue in queues), default=before.clock)
    served = dict(before.served)
    served_at = dict(before.served_at_ms)
    for queue in queues:
        # Accounts are one per tenant over both classes: each queue adds its own part.
        for tenant in queue.touched:
            entered = max(before.served.get(tenant, 0.0), before.clock)
            gained = queue.served[tenant] - entered
            served[tenant] = max(served.get(tenant, 0.0), before.clock) + gained
            served_at[tenant] = now_ms
    return Fairness(
        clock=clock,
        served={t: account for t, account in served.items() if account > clock},
        served_at_ms={
            t: at for t, at in served_at.items() if now_ms - at < 2 * OVERDUE_MS
        },
        since_bulk=since_bulk,
    )
