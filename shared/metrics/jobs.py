"""Counts a job that ended, where its log line is written: once, whoever ended it."""

from ..messages import JobResult
from .catalog import FIRST_TOKEN, LATENCY, PROMPT_TOKENS, QUEUE_WAIT, REQUESTS
from .labels import model_label


def count_end(result: JobResult, job_class: str, prompt_tokens: int) -> None:
    """Counts one job.

    Args:
        result: How it ended.
        job_class: `interactive` or `bulk`.
        prompt_tokens: Of its prompt.
    """
    model, timings = model_label(result.model), result.timings
    REQUESTS.add(model, result.state)
    if timings.total_ms is not None and result.state == "succeeded":
        LATENCY.observe(timings.total_ms / 1000, model)
    if timings.ttft_ms is not None:
        FIRST_TOKEN.observe(timings.ttft_ms / 1000, model, job_class)
    if timings.queued_ms is not None:
        QUEUE_WAIT.observe(timings.queued_ms / 1000, model, job_class)
        PROMPT_TOKENS.add(model, job_class, by=prompt_tokens)
