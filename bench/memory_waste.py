"""What static batches with contiguous KV caches would waste on a workload."""

from collections.abc import Sequence


def static_waste(
    lengths: Sequence[tuple[int, int]], batch_size: int, context: int | None = None
) -> float:
    """Returns the part of the reserved slots that hold no token, over all steps.

    Batches take the requests in their order. Each sequence has its place reserved until
    the batch's longest output is complete; after a step it holds its prompt and the
    tokens that it has produced so far.

    Args:
        lengths: Prompt and output tokens of each request.
        batch_size: Requests in a batch.
        context: Slots reserved for a sequence; None is the batch's longest prompt and
            longest output together.
    """
    reserved = used = 0
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        steps = max(output for _, output in batch)
        slots = context or max(prompt for prompt, _ in batch) + steps
        reserved += slots * len(batch) * steps
        # While it grows a sequence holds prompt + 0, 1, ... output - 1 tokens; then
        # its finished tokens stay, of no use to anyone.
        used += sum(
            prompt * output + output * (output - 1) // 2 for prompt, output in batch
        )
    return 1 - used / reserved
