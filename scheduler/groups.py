"""Live worker groups as the policy sees them."""

from typing import Final

from ..shared.script_types import GroupInfo
from .snapshot import GroupView

PREFILL_CHUNK: Final = 512
"""Prompt tokens of one engine step at most: what bounds its time."""


def view_of(info: GroupInfo) -> GroupView | None:
    """Returns what the policy needs of a group.

    Args:
        info: The group's hash; it has expired when the group fell silent.

    Returns:
        None for a group that is draining or whose hash is not complete.
    """
    sizes = (info.total_blocks, info.max_running, info.block_size, info.batch_tokens)
    if info.state != "ready" or not info.group or min(sizes) < 1:
        return None
    running = max(info.max_running - info.credit_running, 0)
    prefill = max(info.batch_tokens - info.credit_tokens, 0)
    a, b = info.step_fit_ms
    return GroupView(
        group=info.group,
        total_blocks=info.total_blocks,
        max_running=info.max_running,
        batch_tokens=info.batch_tokens,
        block_size=info.block_size,
        max_context=info.max_context,
        free_blocks=info.credit_blocks,
        free_running=info.credit_running,
        free_tokens=info.credit_tokens,
        step_ms=max(a + b * (running + min(prefill, PREFILL_CHUNK)), 0.0),
    )
