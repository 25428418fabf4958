"""Waiting jobs and groups for tests of the policy: small numbers, all of them named."""

from tokenmill.scheduler.policy import plan
from tokenmill.scheduler.snapshot import GroupView, Plan, Snapshot, WaitingJob
from tokenmill.shared.messages import JobClass

NOW = 1_000_000
BULK = JobClass.BULK


def job(name: str, tokens: int = 10, **fields: object) -> WaitingJob:
    defaults: dict[str, object] = {
        "max_tokens": 10,
        "bucket": "128",
        "tenant": "t",
        "enqueued_ms": NOW,
    }
    return WaitingJob(id=name, tokens=tokens, **{**defaults, **fields})


def group(name: str = "w", **fields: object) -> GroupView:
    sizes: dict[str, object] = {
        "total_blocks": 100,
        "max_running": 4,
        "batch_tokens": 1000,
        "block_size": 8,
        "max_context": 4096,
    }
    sizes.update(fields)
    free = {
        "free_blocks": sizes["total_blocks"],
        "free_running": sizes["max_running"],
        "free_tokens": sizes["batch_tokens"],
    }
    return GroupView(group=name, **{**free, **sizes})


def order(made: Plan) -> list[str]:
    return [a.job_id for batch in made.batches for a in batch.assignments]


def decide(jobs: list[WaitingJob], *groups: GroupView, **fields: object) -> Plan:
    return plan(Snapshot(jobs=tuple(jobs), groups=groups, **fields), NOW)
