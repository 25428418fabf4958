"""Counts a job that ended, where its log line is written: once, whoever ended it."""

from functools import lru_cache
from typing import Final

from ..messages import JobClass, JobResult
from ..shadow_keys import SHADOW_TENANT
from .catalog import (
    DEAD,
    DISPATCHED,
    FIRST_TOKEN,
    LATENCY,
    LEASES_LOST,
    PROMPT_TOKENS,
    QUEUE_WAIT,
    REQUESTS,
)
from .instruments import Series
from .labels import model_label

END_STATES: Final = ("succeeded", "failed", "cancelled", "expired")
"""What a job may end as."""


@lru_cache(maxsize=256)
def _series(model: str, job_class: str) -> tuple[Series, Series, Series]:
    """The histograms of jobs of one kind, found once."""
    return (
        LATENCY.of(model),
        FIRST_TOKEN.of(model, job_class),
        QUEUE_WAIT.of(model, job_class),
    )


def begin_counting(model: str) -> None:
    """Shows a scheduler's counters of a model before there is anything to count.

    One that first shows at n has no rise to n, so no alert would see the first event.

    Args:
        model: As `model_label` has it.
    """
    for state in END_STATES:
        REQUESTS.add(model, state, by=0)
    for job_class in JobClass:
        DISPATCHED.add(model, str(job_class), by=0)
    LEASES_LOST.add(model, by=0)
    DEAD.add(model, by=0)


def count_end(
    result: JobResult, job_class: str, tenant: str, prompt_tokens: int
) -> None:
    """Counts one job; no copy of one, which is nobody's.

    Args:
        result: How it ended.
        job_class: `interactive` or `bulk`.
        tenant: Whose it is.
        prompt_tokens: Of its prompt.
    """
    if tenant == SHADOW_TENANT:
        return
    model, timings = model_label(result.model), result.timings
    latency, first_token, queue_wait = _series(model, job_class)
    REQUESTS.add(model, result.state)
    if timings.total_ms is not None and result.state == "succeeded":
        latency.observe(timings.total_ms / 1000)
    if timings.ttft_ms is not None:
        first_token.observe(timings.ttft_ms / 1000)
    if timings.queued_ms is not None:
        queue_wait.observe(timings.queued_ms / 1000)
        PROMPT_TOKENS.add(model, job_class, by=prompt_tokens)
