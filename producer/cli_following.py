"""Following one job from the command line: its output as it comes, and its end."""

import asyncio
from typing import TYPE_CHECKING

from .cli_output import DeltaPrinter, print_json, print_result
from .cli_submit_options import Following

if TYPE_CHECKING:
    from .job import Job


async def follow(
    job: "Job", following: Following, num_choices: int, *, as_json: bool
) -> None:
    """Prints what a job produces, at its end or as it comes.

    Args:
        job: Whose output.
        following: What was asked for.
        num_choices: Number of choices.
        as_json: JSON lines instead of text.

    Raises:
        JobFailed: It did not succeed.
        ResultTimeout: It was not done in time; it goes on.
    """
    from ..shared.errors import ResultTimeout

    if not following.stream:
        await _print_outcome(job, following.timeout_s, as_json=as_json)
        return
    if as_json:
        print_json({"id": job.id, "duplicate": job.duplicate})
    try:
        async with asyncio.timeout(following.timeout_s):
            await print_stream(job, 0, num_choices, as_json=as_json)
    except TimeoutError:
        raise ResultTimeout(
            f"job {job.id} was not done after {following.timeout_s} s; it goes on"
        ) from None


async def print_stream(
    job: "Job", from_offset: int, num_choices: int, *, as_json: bool
) -> None:
    """Prints a job's output as it comes; as JSON, the result comes last.

    Args:
        job: Whose output.
        from_offset: First token wanted, for every choice.
        num_choices: Number of choices, where known; else 1.
        as_json: JSON lines instead of text.

    Raises:
        JobFailed: After the last line of a job that did not succeed.
    """
    from ..shared.errors import JobFailed

    printer = DeltaPrinter(as_json=as_json, num_choices=num_choices)
    try:
        async with job.stream(from_offset) as deltas:
            async for delta in deltas:
                printer.write(delta)
    except JobFailed:
        if not as_json:
            raise
    finally:
        printer.close()
    if as_json:
        await _print_outcome(job, None, as_json=True)


async def _print_outcome(job: "Job", timeout_s: float | None, *, as_json: bool) -> None:
    """Prints a job's result; as JSON, that of a job without success as well: it holds
    what the job had produced and cost by then.

    Raises:
        JobFailed: After the result of a job that did not succeed.
    """
    from ..shared.errors import JobFailed

    try:
        result = await job.result(timeout_s)
    except JobFailed:
        if as_json and job.outcome is not None:
            print_json(job.outcome)
        raise
    print_result(result, as_json=as_json)
