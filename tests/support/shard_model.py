"""What the scripts should answer, reckoned from the records alone."""

from collections.abc import Mapping
from typing import Any

from tokenmill.shared.lifecycle import ACTIVE, WAITING

Jobs = Mapping[str, Mapping[str, str]]


class Grant:
    """A dispatch that some group once received; it may long be out of date."""

    def __init__(self, job_id: str, group: str, epoch: int, choices: int = 1) -> None:
        self.job_id, self.group, self.epoch = job_id, group, epoch
        self.choices = choices
        self.seq = 0
        self.offsets = [0] * choices
        self.finished = False

    def is_held(self, jobs: Jobs) -> bool:
        """Whether it is still its job's present one."""
        job = jobs[self.job_id]
        return (
            job["state"] in ACTIVE
            and job["owner"] == self.group
            and job["epoch"] == str(self.epoch)
        )


def held_by(jobs: Jobs, group: str) -> list[str]:
    """Ids of the jobs that a group holds."""
    return [
        job_id
        for job_id, job in jobs.items()
        if job["state"] in ACTIVE and job["owner"] == group
    ]


def prefill_held(job: Mapping[str, str]) -> int:
    """Prefill tokens that a job still holds: of choices that have said nothing yet."""
    choices = int(job["cost_running"])
    seen = len([part for part in job.get("prefilled", "").split(",") if part])
    return int(job["tokens"]) * max(choices - seen, 0)


def fits(
    room: Mapping[str, int],
    jobs: Jobs,
    group: str,
    item: Mapping[str, Any],
    job_class: str,
) -> bool:
    """Whether a group should take a job: its sizes less what others may not lose."""
    mine = [jobs[job_id] for job_id in held_by(jobs, group)]
    if any(job["alone"] == "1" for job in mine) or (item["alone"] and mine):
        return False
    counted = [j for j in mine if job_class == "bulk" or j["class"] == "interactive"]
    blocks = room["total_blocks"] - sum(int(job["cost_blocks"]) for job in counted)
    slots = room["max_running"] - sum(int(job["cost_running"]) for job in counted)
    tokens = room["batch_tokens"] - sum(prefill_held(job) for job in counted)
    if item["alone"]:
        return blocks >= item["cost_blocks"]
    return (
        blocks >= item["cost_blocks"]
        and slots >= 1
        and _within(item["choices"], slots, room["max_running"])
        and _within(item["tokens"] * item["choices"], tokens, room["batch_tokens"])
    )


def _within(need: int, left: int, whole: int) -> bool:
    return need <= left or need > whole <= left


def waiting(jobs: Jobs, tenant: str | None = None) -> int:
    """How many jobs wait, of one tenant or of all."""
    return sum(
        job["state"] in WAITING and tenant in (None, job["tenant"])
        for job in jobs.values()
    )


class LossCount:
    """How many leases each job has lost, in company and alone, as told step by step."""

    def __init__(self) -> None:
        self._lost: dict[str, tuple[int, int]] = {}

    def note(self, job_id: str, before: Mapping[str, str]) -> None:
        """Counts the loss of a lease that a job had."""
        if before["state"] == "running":
            losses, alone = self._lost.get(job_id, (0, 0))
            self._lost[job_id] = (losses + 1, alone + (before["alone"] == "1"))

    def check(self, jobs: Jobs) -> None:
        """Asserts that the records say the same."""
        for job_id, job in jobs.items():
            told = (int(job.get("lease_losses", 0)), int(job.get("alone_losses", 0)))
            assert told == self._lost.get(job_id, (0, 0)), job_id
