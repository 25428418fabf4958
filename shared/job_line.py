"""The canonical log line of a job: one for each, whoever ends it."""

from typing import Final

from .messages import JobResult

JOB_EVENT: Final = "job"
"""What the line is called."""


def job_line(
    result: JobResult,
    *,
    job_class: str,
    tenant: str,
    bucket: str,
    prompt_tokens: int,
    epoch: int,
) -> dict[str, object]:
    """Returns the fields of the line; no prompt text, no output.

    Args:
        result: How the job ended.
        job_class: `interactive` or `bulk`.
        tenant: Whose job it was.
        bucket: Its length bucket.
        prompt_tokens: Exact where it was ever dispatched, else the client's estimate.
        epoch: How often it was given to a worker, or taken from one.
    """
    timings = result.timings
    return {
        "job": result.id,
        "model": result.model,
        "version": result.version,
        "job_class": job_class,
        "tenant": tenant,
        "bucket": bucket,
        "state": result.state,
        "prompt_tokens": prompt_tokens,
        "output_tokens": result.usage.completion_tokens,
        "queued_ms": timings.queued_ms,
        "ttft_ms": timings.ttft_ms,
        "total_ms": timings.total_ms,
        "finish_reasons": [choice.finish_reason.value for choice in result.choices],
        "error": result.error.code if result.error else None,
        "epoch": epoch,
    }
