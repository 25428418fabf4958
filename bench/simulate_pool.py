"""Runs a policy against simulated groups, and measures both."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from simulate_group import NEVER, Group, Run
from simulate_load import Arrival

from tokenmill.scheduler.clock import ArrivalRate
from tokenmill.scheduler.snapshot import Fairness, Plan, Snapshot, WaitingJob
from tokenmill.scheduler.waiting import Ready, WaitingRoom
from tokenmill.shared.keys import lane_of
from tokenmill.shared.messages import JobClass

READ_AHEAD = 256
"""Entries of a lane in memory, as `scheduler.read_ahead`."""

Event = tuple[float, JobClass, str, int]
"""When, whose and how many tokens: prompt and most output."""
Policy = Callable[[Snapshot, int], Plan]


class Lanes:
    """Waiting jobs as in Redis: a stream by class, bucket and tenant's lane."""

    def __init__(self) -> None:
        self.room = WaitingRoom()
        self._behind: dict[str, deque[WaitingJob]] = {}
        self.waiting = 0

    def add(self, job: WaitingJob) -> None:
        """Appends a job to its lane."""
        stream = f"{job.job_class}:{job.bucket}:{lane_of(job.tenant)}"
        self._behind.setdefault(stream, deque()).append(job)
        self.waiting += 1

    def read_on(self) -> None:
        """Reads lanes of which little is in memory, as `LaneReader` does."""
        for stream, behind in self._behind.items():
            if behind and self.room.count(stream) <= READ_AHEAD // 2:
                for _ in range(min(len(behind), READ_AHEAD)):
                    self.room.add(Ready(behind.popleft(), b"", stream, ""))

    def candidates(self) -> tuple[WaitingJob, ...]:
        """Returns what a plan looks at."""
        return self.room.candidates()

    def take(self, job_id: str) -> WaitingJob:
        """Removes a job that was given to a group."""
        ready = self.room.take(job_id)
        assert ready is not None
        self.waiting -= 1
        return ready.job


class OneLine:
    """One queue in order of arrival: what a plain queue has."""

    def __init__(self) -> None:
        self._jobs: dict[str, WaitingJob] = {}

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self._jobs)

    def add(self, job: WaitingJob) -> None:
        """Appends a job."""
        self._jobs[job.id] = job

    def read_on(self) -> None:
        """Everything is read."""

    def candidates(self) -> tuple[WaitingJob, ...]:
        """Returns the front of the queue."""
        return tuple(islice(self._jobs.values(), 2048))

    def take(self, job_id: str) -> WaitingJob:
        """Removes a job that was given to a group."""
        return self._jobs.pop(job_id)


class Outcome:
    """What a simulation saw."""

    def __init__(self) -> None:
        self.ended: list[Run] = []
        self.plan_s: list[float] = []
        self.looked_at: list[int] = []
        self.arrived: list[Event] = []
        self.dispatched: list[Event] = []
        self.end_ms = 0.0
        self.preemptions = 0
        self.loads: list[list[int]] = []
        """Tokens that each group still has to compute, second by second."""


class Simulation:
    """Groups, a queue and a policy on one simulated clock.

    Args:
        policy: Decides.
        queue: What waits.
        groups: The pool.
        weights: Of tenants.
        plan_every_ms: Shortest time between two plans: a round trip to Redis.
        short_tokens: Divides the length classes.
        note_loads: Whether to note how much each group has in hand.
    """

    def __init__(
        self,
        policy: Policy,
        queue: Lanes | OneLine,
        groups: list[Group],
        weights: Mapping[str, float],
        plan_every_ms: float = 10.0,
        short_tokens: int = 2048,
        *,
        note_loads: bool = False,
    ) -> None:
        self._policy = policy
        self._queue = queue
        self._groups = groups
        self._by_name = {group.name: index for index, group in enumerate(groups)}
        self._weights = weights
        self._every = plan_every_ms
        self._short_tokens = short_tokens
        self._note_loads = note_loads
        self._events: list[tuple[float, int]] = []
        self._outputs: dict[str, int] = {}
        self._fairness = Fairness()
        self._now = 0.0
        self._rate = ArrivalRate(lambda: self._now / 1000)
        self.outcome = Outcome()

    def run(self, arrivals: Iterable[Arrival], until_ms: float = NEVER) -> Outcome:
        """Runs until every job has ended, or for so long."""
        coming = iter(arrivals)
        ahead = next(coming, None)
        second = 1000.0
        while self._now < until_ms:
            if ahead is None and not self._queue.waiting and not self._events:
                break
            self._now += self._every
            count = 0
            while ahead is not None and ahead[0] <= self._now:
                self._arrive(ahead)
                ahead, count = next(coming, None), count + 1
            if count:
                self._rate.add(count)
            self._advance()
            if self._queue.waiting:
                self._decide()
            if self._note_loads and self._now >= second:
                second += 1000.0
                self.outcome.loads.append([g.work for g in self._groups])
        self.outcome.preemptions = sum(group.preemptions for group in self._groups)
        self.outcome.end_ms = max(
            (run.finished_ms for run in self.outcome.ended), default=self._now
        )
        return self.outcome

    def _arrive(self, arrival: Arrival) -> None:
        at, job, output = arrival
        self._outputs[job.id] = output
        self._queue.add(job)
        cost = job.tokens + job.max_tokens
        self.outcome.arrived.append((at, job.job_class, job.tenant, cost))

    def _advance(self) -> None:
        """Lets every group go to the present."""
        events, now = self._events, self._now
        while events and events[0][0] <= now:
            at, index = heapq.heappop(events)
            group = self._groups[index]
            if group.next_ms != at:
                continue  # a job that joined has brought the end of the step forward
            self.outcome.ended += group.step()
            if group.next_ms < NEVER:
                heapq.heappush(events, (group.next_ms, index))

    def _decide(self) -> None:
        self._queue.read_on()
        snapshot = Snapshot(
            jobs=self._queue.candidates(),
            groups=tuple(group.view() for group in self._groups),
            fairness=self._fairness,
            arrivals_per_s=self._rate.per_second(),
            weights=self._weights,
            short_tokens=self._short_tokens,
        )
        began = time.process_time()
        made = self._policy(snapshot, int(self._now))
        self.outcome.plan_s.append(time.process_time() - began)
        self.outcome.looked_at.append(len(snapshot.jobs))
        self._fairness = made.fairness
        assert not made.impossible
        for batch in made.batches:
            index = self._by_name[batch.group]
            group = self._groups[index]
            before = group.next_ms
            for given in batch.assignments:
                job = self._queue.take(given.job_id)
                group.take(job, given, self._outputs.pop(job.id), self._now)
                cost = job.tokens + job.max_tokens
                event = (self._now, job.job_class, job.tenant, cost)
                self.outcome.dispatched.append(event)
            if group.next_ms != before:
                heapq.heappush(self._events, (group.next_ms, index))
