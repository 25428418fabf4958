"""A worker group as arithmetic: steps of a + b n ms, chunked prefill, preempted bulk.

Steps in which nothing changes are counted at once, so a job costs a few events.
"""

import heapq
import math

from tokenmill.scheduler.snapshot import Assignment, GroupView, WaitingJob
from tokenmill.shared.messages import JobClass

PREFILL_CHUNK = 512
NEVER = math.inf


class Run:
    """One job in a group, and when what happened to it (ms)."""

    __slots__ = (
        "blocks",
        "bulk",
        "dispatched_ms",
        "finish_step",
        "finished_ms",
        "first_ms",
        "job",
        "left",
        "made",
        "prefill_left",
    )

    def __init__(self, job: WaitingJob, output: int, blocks: int, at_ms: float) -> None:
        self.job = job
        self.bulk = job.job_class is JobClass.BULK
        self.blocks = blocks
        self.left = output
        self.made = 0
        self.prefill_left = job.tokens
        self.finish_step = -1
        self.dispatched_ms = at_ms
        self.first_ms = NEVER
        self.finished_ms = NEVER


class Group:
    """One simulated group with credit as Redis would keep it.

    Args:
        name: Its name.
        fit: (a, b): a step of n tokens takes a + b n ms.
        serves: The length class it is bound to.
        max_running: Slots.
        total_blocks: KV blocks of 8 tokens.
    """

    def __init__(
        self,
        name: str,
        fit: tuple[float, float],
        serves: str = "any",
        max_running: int = 16,
        total_blocks: int = 4096,
    ) -> None:
        self.name, self.serves = name, serves
        self.base_ms, self.token_ms = fit
        self.max_running, self.total_blocks = max_running, total_blocks
        self.batch_tokens = 4096
        self.free = [total_blocks, max_running, self.batch_tokens]
        self.bulk = [0, 0, 0]
        self.at_ms, self.next_ms = 0.0, NEVER
        self.preemptions = 0
        self._steps, self._ahead, self._step_ms = 0, 0, 0.0
        self._slots, self._blocks = max_running, total_blocks
        self._waiting: list[Run] = []
        self._prefill: list[Run] = []
        self._decode: list[tuple[int, int, Run]] = []
        self._decoding = 0
        self._order = 0
        self._view: GroupView | None = None

    @property
    def work(self) -> int:
        """Tokens that are still to be computed, as of the last step counted."""
        waiting = (*self._waiting, *self._prefill)
        ahead = sum(run.prefill_left + run.left for run in waiting)
        return ahead + sum(
            step - self._steps
            for step, _, run in self._decode
            if run.finish_step == step
        )

    def view(self) -> GroupView:
        """Returns what the policy sees of it."""
        if self._view is None:
            blocks, running, tokens = self.free
            prefill = min(max(self.batch_tokens - tokens, 0), PREFILL_CHUNK)
            in_step = self.max_running - running + prefill
            self._view = GroupView(
                group=self.name,
                total_blocks=self.total_blocks,
                max_running=self.max_running,
                batch_tokens=self.batch_tokens,
                block_size=8,
                max_context=8192,
                free_blocks=blocks,
                free_running=running,
                free_tokens=tokens,
                bulk_blocks=self.bulk[0],
                bulk_running=self.bulk[1],
                bulk_tokens=self.bulk[2],
                step_ms=self.base_ms + self.token_ms * max(in_step, 0),
                serves=self.serves,  # type: ignore[arg-type]
            )
        return self._view

    def take(self, job: WaitingJob, given: Assignment, output: int, now: float) -> Run:
        """Books and admits a job; it joins at the end of the step in progress."""
        run = Run(job, output, given.cost_blocks, now)
        self._book(run, [run.blocks, 1, job.tokens], -1)
        self._waiting.append(run)
        if self.next_ms == NEVER:
            self.at_ms = now
            self._next()
        elif self._ahead > 1:
            done = max(1, math.ceil((now - self.at_ms) / self._step_ms))
            self._ahead = min(self._ahead, done)
            self.next_ms = self.at_ms + self._ahead * self._step_ms
        return run

    def _book(self, run: Run, amounts: list[int], sign: int) -> None:
        self._view = None
        for i, amount in enumerate(amounts):
            self.free[i] += sign * amount
            if run.bulk:
                self.bulk[i] -= sign * amount

    def step(self) -> list[Run]:
        """Goes to the end of the present steps; returns the jobs that ended there."""
        self.at_ms = self.next_ms
        self._steps += self._ahead
        ended: list[Run] = []
        chunk = PREFILL_CHUNK
        while self._prefill and chunk > 0:
            run = self._prefill[0]
            part = min(chunk, run.prefill_left)
            chunk -= part
            run.prefill_left -= part
            if run.prefill_left:
                break
            self._prefill.pop(0)
            self._first(run, ended)
        while self._decode and self._decode[0][0] <= self._steps:
            run = heapq.heappop(self._decode)[2]
            if run.finish_step == self._steps:
                self._decoding -= 1
                self._end(run, ended)
        self._next()
        return ended

    def _first(self, run: Run, ended: list[Run]) -> None:
        """The step that computed the last of a prompt made a token."""
        if run.first_ms == NEVER:
            run.first_ms = self.at_ms
            self._book(run, [0, 0, run.job.tokens], 1)
        run.left -= 1
        run.made += 1
        if run.left <= 0:
            self._end(run, ended)
            return
        run.finish_step = self._steps + run.left
        self._order += 1
        heapq.heappush(self._decode, (run.finish_step, self._order, run))
        self._decoding += 1

    def _end(self, run: Run, ended: list[Run]) -> None:
        run.made, run.left = run.made + run.left, 0
        run.finished_ms = self.at_ms
        self._slots += 1
        self._blocks += run.blocks
        self._book(run, [run.blocks, 1, 0], 1)
        ended.append(run)

    def _next(self) -> None:
        """Admits what has room and plans the next steps."""
        if self._waiting:
            self._admit()
        if self._prefill:
            chunk = min(PREFILL_CHUNK, sum(run.prefill_left for run in self._prefill))
            self._ahead = 1
            self._step_ms = self.base_ms + self.token_ms * (self._decoding + chunk)
        elif self._decoding:
            while self._decode[0][2].finish_step != self._decode[0][0]:
                heapq.heappop(self._decode)  # it was preempted
            self._ahead = self._decode[0][0] - self._steps
            self._step_ms = self.base_ms + self.token_ms * self._decoding
        else:
            self.next_ms = NEVER
            return
        self.next_ms = self.at_ms + self._ahead * self._step_ms

    def _admit(self) -> None:
        """Interactive jobs first; for them bulk gives way, the latest first."""
        self._waiting.sort(key=lambda run: run.bulk)
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            while not self._has_room(run) and not run.bulk and self._preempt():
                pass
            if not self._has_room(run):
                self._waiting.append(run)
                continue
            self._slots -= 1
            self._blocks -= run.blocks
            self._prefill.append(run)
        self._prefill.sort(key=lambda run: run.bulk)

    def _has_room(self, run: Run) -> bool:
        return self._slots > 0 and self._blocks >= run.blocks

    def _preempt(self) -> bool:
        """Takes the room of one bulk job, which loses no token and waits again."""
        victim = next((run for run in reversed(self._prefill) if run.bulk), None)
        if victim is not None:
            self._prefill.remove(victim)
        else:
            bulk = [
                entry
                for entry in self._decode
                if entry[2].bulk and entry[2].finish_step == entry[0]
            ]
            if not bulk:
                return False
            victim = max(bulk, key=lambda entry: entry[1])[2]
            made = victim.left - (victim.finish_step - self._steps)
            victim.left -= made
            victim.made += made
            victim.finish_step = -1
            self._decoding -= 1
        victim.prefill_left = victim.job.tokens + victim.made
        self.preemptions += 1
        self._slots += 1
        self._blocks += victim.blocks
        self._waiting.append(victim)
        return True
