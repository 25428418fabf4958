"""The order in which waiting jobs of one class are served. Pure.

Within a tenant: jobs in mid-output, then urgency band, then due time. Between tenants:
band, then the tokens that each was given (weighted fair queueing in virtual time).
Every step has a bound on how long it can pass anyone over, so nothing starves:

- what stopped in mid-output goes on before the rest of its tenant, in the place between
  tenants that the rest has; these are no more than what ran at once;
- priority: a job rises by one for each second it waits, up to the most urgent band;
- a flood of one tenant: between tenants only the time counts for which a tenant got
  nothing at all, so that old jobs of a flood do not overtake a newcomer;
- everything else: whoever got nothing for `OVERDUE_MS` goes first.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from .snapshot import Fairness, WaitingJob

URGENT_MS: Final = 5_000
"""A job that has to start within this, to end in time, is in the most urgent band."""
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
        step_ms: Time of one output token, for the slack of a deadline; 0: unknown.
        made_ratio: Output tokens made for each one asked for.
    """

    def __init__(
        self,
        jobs: Iterable[WaitingJob],
        fairness: Fairness,
        weights: Mapping[str, float],
        now_ms: int,
        *,
        step_ms: float = 0.0,
        made_ratio: float = 1.0,
    ) -> None:
        self._now_ms = now_ms
        self._weights = weights
        self._before = fairness
        self._made_ratio = made_ratio
        self._token_ms = step_ms * made_ratio
        self.clock = fairness.clock
        self.served: dict[str, float] = {}
        self.touched: set[str] = set()
        self._rest: dict[str, WaitingJob] = {}
        """Of tenants with jobs in mid-output, the first of the others."""
        by_tenant: dict[str, list[WaitingJob]] = {}
        for job in jobs:
            by_tenant.setdefault(job.tenant, []).append(job)
        self._top = self._most_urgent_band(by_tenant)
        for tenant, waiting in by_tenant.items():
            self._join(tenant)
            if len(waiting) > 1:
                waiting.sort(key=self._within_tenant, reverse=True)
                if waiting[-1].started:
                    self._note_rest(tenant, waiting)
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

    def remaining(self) -> Iterator[WaitingJob]:
        """Yields the jobs that were not popped, in no particular order."""
        return chain.from_iterable(self._by_tenant.values())

    def settle(self, job: WaitingJob, *, given: bool) -> None:
        """Says whether the job just popped was given to a group.

        Args:
            job: The job.
            given: True charges its tenant; False leaves the accounts as they are.
        """
        if given:
            self.charge(job)
        self._offer(job.tenant)

    def charge(self, job: WaitingJob) -> None:
        """Books a job on its tenant: prompt and expected output of every choice."""
        self._join(job.tenant)
        self.clock = max(self.clock, self.served[job.tenant])
        weight = max(self._weights.get(job.tenant, 1.0), 1e-6)
        output = job.max_tokens * self._made_ratio
        self.served[job.tenant] += job.choices * (job.tokens + output) / weight
        self.touched.add(job.tenant)

    def _join(self, tenant: str) -> None:
        # Whoever was away does not come back with a claim on the past.
        entered = max(self._before.served.get(tenant, 0.0), self._before.clock)
        self.served.setdefault(tenant, entered)

    def _offer(self, tenant: str) -> None:
        """Enters the tenant with its best job."""
        waiting = self._by_tenant.get(tenant)
        if not waiting:
            return
        job = waiting[-1]
        passed_over = self._passed_over(job)
        band, due = self._urgency(job, passed_over)
        if job.started and tenant in self._rest:
            # Going first in its tenant must not cost the tenant its place.
            rest = self._rest[tenant]
            waited = self._passed_over(rest)
            band, due = min((band, due), self._urgency(rest, waited))
            passed_over = max(passed_over, waited)
        account = self.served[tenant]
        if passed_over >= OVERDUE_MS:
            band, account = self._top - 1, 0.0
        heapq.heappush(self._heap, (band, account, due, job.id, tenant))

    def _passed_over(self, job: WaitingJob) -> int:
        """Milliseconds for which its tenant got nothing while it waited."""
        tenant, waited = job.tenant, self._now_ms - job.enqueued_ms
        if tenant in self.touched:
            return 0
        if tenant in self._before.served_at_ms:
            return min(waited, self._now_ms - self._before.served_at_ms[tenant])
        return waited

    def _note_rest(self, tenant: str, waiting: list[WaitingJob]) -> None:
        rest = next((job for job in reversed(waiting) if not job.started), None)
        if rest is not None:
            self._rest[tenant] = rest

    def _most_urgent_band(self, by_tenant: Mapping[str, list[WaitingJob]]) -> int:
        top, urgent = 0, False
        first = True
        for waiting in by_tenant.values():
            for job in waiting:
                if first or job.priority < top:
                    top, first = job.priority, False
                if not urgent and job.deadline_ms is not None:
                    urgent = self._start_by(job) - self._now_ms <= URGENT_MS
        return top - 1 if urgent else top

    def _start_by(self, job: WaitingJob) -> float:
        """When the job has to start so as to end in time, by measured rates."""
        assert job.deadline_ms is not None
        return job.deadline_ms - job.max_tokens * self._token_ms

    def _urgency(self, job: WaitingJob, waited_ms: int) -> tuple[int, float]:
        """Band (the smaller, the more urgent) and due time."""
        top = self._top
        band = job.priority - waited_ms // AGEING_MS if waited_ms > 0 else job.priority
        due: float = job.enqueued_ms + OVERDUE_MS
        if job.deadline_ms is not None:
            start_by = self._start_by(job)
            due = min(due, start_by)
            if start_by - self._now_ms <= URGENT_MS:
                return top, due
        return (band if band > top else top), due

    def _within_tenant(self, job: WaitingJob) -> tuple[bool, int, float, int, str]:
        band, due = self._urgency(job, self._now_ms - job.enqueued_ms)
        return not job.started, band, due, job.enqueued_ms, job.id


def remember(
    before: Fairness,
    queues: Iterable[FairQueue],
    *,
    since_bulk: int,
    bulk_at_ms: int,
    pushed_ms: Mapping[str, int],
    restored_ms: Mapping[str, int],
    suspect_had_turn: bool,
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
        bulk_at_ms=bulk_at_ms,
        pushed_ms=pushed_ms,
        restored_ms=restored_ms,
        suspect_had_turn=suspect_had_turn,
    )
