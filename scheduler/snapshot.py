"""What the policy sees and what it decides. Frozen values, no I/O."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from ..shared.messages import DEFAULT_VERSION, JobClass

Serves = Literal["any", "short", "long"]
"""The length class of the jobs that a group is kept for."""


class WaitingJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tokenized job that no group holds."""

    id: str
    tokens: int
    """Exact prompt length."""
    max_tokens: int
    """Most output tokens per choice."""
    choices: int = 1
    job_class: JobClass = JobClass.INTERACTIVE
    bucket: str
    """By exact prompt length."""
    priority: int = 0
    """A smaller number is more urgent."""
    tenant: str
    enqueued_ms: int
    """By the clock of Redis, as all times here."""
    deadline_ms: int | None = None
    alone: bool = False
    """A suspect, which has lost several leases: it goes to an empty group only, and
    nobody joins it."""
    started: bool = False
    """Its client has had tokens of it: a worker gave it up in mid-output."""
    schema: int = 1
    """Lowest schema version whose readers understand its record."""
    version: str = ""
    """The only version of the model that may run it; any where empty."""
    weights: str = ""
    """What its output was begun with."""
    needs: str = ""
    """What a group has to offer to it (`targets.py`)."""
    tokenizer: str = ""
    """What its prompt was encoded with; empty where that does not matter."""
    adapter: str = ""
    """The one that it runs with (`adapters.short_digest`); empty without one."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that are computed: every choice prefills the prompt."""
        return self.tokens * self.choices


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker group: its size and what is not yet promised of it."""

    group: str
    total_blocks: int
    max_running: int
    batch_tokens: int
    """Prefill budget: prompt tokens that may be promised and not yet prefilled."""
    block_size: int
    max_context: int
    free_blocks: int
    free_running: int
    free_tokens: int
    """Below zero while a prompt larger than the budget is prefilled alone."""
    bulk_blocks: int = 0
    """What bulk jobs hold now of the three budgets. An interactive job may take it,
    down to minus that much of free credit: the engine preempts bulk for it."""
    bulk_running: int = 0
    bulk_tokens: int = 0
    step_ms: float = 0.0
    """Measured mean time of an engine step; 0 while nothing was measured."""
    alone: str = ""
    """The job that it runs alone; nobody joins it meanwhile."""
    serves: Serves = "any"
    """The length class that it is bound to."""
    schema: int = 1
    """Newest schema version that it reads."""
    version: str = DEFAULT_VERSION
    """Of the model."""
    weights: str = ""
    tokenizer: str = ""
    """What its prompts are to be encoded with; empty: it does not say."""
    offers: frozenset[str] = frozenset()
    """Needs of jobs that it satisfies."""
    adapters: frozenset[str] = frozenset()
    """In its memory, as far as it says; no need of any job."""

    @property
    def idle(self) -> bool:
        """Whether nothing is promised to it."""
        return self.free_running >= self.max_running

    def cost_blocks(self, job: WaitingJob) -> int:
        """KV blocks for prompt and full output of every choice.

        Reserved in full, so that the engine never runs out in mid-generation.
        """
        longest = min(job.tokens + job.max_tokens, self.max_context)
        return job.choices * -(-longest // self.block_size)

    def could_hold(self, job: WaitingJob) -> bool:
        """Whether the job may go there and would fit into the empty group."""
        readable = job.schema <= self.schema and job.tokens < self.max_context
        if not readable or (job.needs and not self.admits(job)):
            return False
        return self.cost_blocks(job) <= self.total_blocks

    def admits(self, job: WaitingJob) -> bool:
        """Whether the job may go there: its version, weights and tokenizer."""
        if not job.needs:
            return True
        same = not (job.tokenizer and self.tokenizer) or (
            job.tokenizer == self.tokenizer
        )
        return same and job.needs in self.offers


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy remembers between two plans."""

    clock: float = 0.0
    """Virtual time: the account of the tenant that was served last."""
    served: Mapping[str, float] = {}
    """Tenant -> tokens it was given, divided by its weight, since it joined."""
    served_at_ms: Mapping[str, int] = {}
    """Tenant -> when it was last given anything."""
    since_bulk: int = 0
    """Interactive tokens given out since bulk had a turn of its own."""
    bulk_at_ms: int = 0
    """When bulk was last given anything."""
    pushed_ms: Mapping[str, int] = {}
    """Group -> since when interactive work has held what its bulk was given."""
    restored_ms: Mapping[str, int] = {}
    """Group -> since when its bulk has had that back, in its turn."""
    suspect_had_turn: bool = False
    """A suspect went last to the only group; other work is next."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan depends on, besides the time."""

    jobs: tuple[WaitingJob, ...]
    groups: tuple[GroupView, ...]
    fairness: Fairness = Fairness()
    arrivals_per_s: float = 0.0
    """Measured rate of new jobs."""
    max_wait_ms: int = 200
    """Longest wait for a fuller batch."""
    weights: Mapping[str, float] = {}
    """Tenant -> share; 1 where absent."""
    short_tokens: int = 2048
    """Buckets up to this bound are of the length class short, others long."""
    made_ratio: Mapping[JobClass, float] = {}
    """Output tokens made for each one asked for, as measured; 1 where absent."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One job of a batch."""

    job_id: str
    tokens: int
    cost_blocks: int
    choices: int = 1
    alone: bool = False
    """It is dispatched only if the group is empty, and closes it."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one class and one bucket for one group."""

    group: str
    job_class: JobClass
    bucket: str
    assignments: tuple[Assignment, ...]

    @property
    def tokens(self) -> int:
        """Prompt tokens in all."""
        return sum(assignment.tokens for assignment in self.assignments)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now, and when to look again."""

    batches: tuple[Batch, ...] = ()
    wake_in_ms: int | None = None
    """When a held batch is to go; None: nothing is held back for time's sake."""
    fairness: Fairness = Fairness()
    """For the next snapshot."""
    impossible: tuple[str, ...] = ()
    """Jobs that no live group could hold even if it were empty."""
