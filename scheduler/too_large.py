"""Why a job is too large for every group that it may go to."""

from collections.abc import Sequence

from ..shared.errors import PromptTooLong
from .snapshot import GroupView, WaitingJob


def too_large(job: WaitingJob, groups: Sequence[GroupView]) -> PromptTooLong:
    """Names what the job needs and what the largest of these groups has.

    Args:
        job: It fits into none of them.
        groups: Live groups that it may go to; at least one.
    """
    largest = max(groups, key=lambda group: group.total_blocks * group.block_size)
    if job.tokens >= largest.max_context:
        return PromptTooLong(
            "request",
            f"the prompt has {job.tokens} tokens; the largest live worker holds "
            f"{largest.max_context} tokens of prompt and output: shorten the prompt "
            "or start a larger worker",
        )
    return PromptTooLong(
        "sampling.max_tokens",
        f"the prompt has {job.tokens} tokens and, with {job.max_tokens} output tokens "
        f"for each of {job.choices} choices, needs room for "
        f"{largest.cost_blocks(job) * largest.block_size}; the largest live worker has "
        f"room for {largest.total_blocks * largest.block_size}: shorten the prompt, "
        "lower max_tokens or n, or start a larger worker",
    )
