"""What a bulk command says at its end, and why it left with the code that it has."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ...shared.errors import (
    BulkItemsFailed,
    BulkRunCancelled,
    InputUnreadable,
    RedisUnavailable,
)
from ..cli_output import duration, print_json, print_note

if TYPE_CHECKING:
    from .working import Ended


class Tell(Protocol):
    """Prints the report of a command."""

    def __call__(self, ended: "Ended", *, as_json: bool) -> None:
        """Prints it.

        Raises:
            BulkItemsFailed: Some items failed.
            BulkRunCancelled: The run was cancelled.
        """


@contextmanager
def told(output: str) -> Iterator[Tell]:
    """Says how to go on when what is inside is broken off.

    Args:
        output: What was given as the output.
    """
    try:
        yield tell
    except (asyncio.CancelledError, KeyboardInterrupt):
        if output != "-":
            print_note(
                f"left; what is done stands in {output}.partial, and what is in the "
                "pool goes on there. Give the same command again to go on"
            )
        raise
    except InputUnreadable as error:
        raise InputUnreadable(
            error.field, f"{error.problem}. {_mended(output)}"
        ) from error
    except RedisUnavailable as error:
        raise RedisUnavailable(
            f"{error}. Nothing that was written is lost: give the same command again"
        ) from error


def _mended(output: str) -> str:
    """What becomes of lines before a damage, and how to get the others."""
    advice = "What comes before that is done"
    if output == "-":
        return f"{advice}; repair the input, and give the command again"
    return (
        f"{advice}, and its lines stand in {output}.partial. A repaired input is "
        "another one: move these lines elsewhere if they are of use, and begin again "
        "with --restart, which runs all of it"
    )


def tell(ended: "Ended", *, as_json: bool) -> None:
    """Prints the report of a command; see `Tell`."""
    if as_json:
        print_json(
            {
                "report": ended.report,
                "output": ended.output,
                "passed_over": ended.others,
            }
        )
    else:
        for line in lines_of(ended):
            print_note(line)
    report = ended.report
    if report.state == "cancelled":
        raise BulkRunCancelled(
            f"run {report.run} was cancelled; {report.succeeded} items have their "
            "lines. Give the same command again to do the rest"
        )
    failed = report.failed + report.refused
    if failed:
        raise BulkItemsFailed(_advice(ended, failed))


def _advice(ended: "Ended", failed: int) -> str:
    advice = f"{failed} of {ended.report.total} failed; their lines say why"
    if ended.report.failed and ended.output != "-":
        advice += f". `tokenmill bulk retry-failed {ended.output}` runs them again"
        if ended.report.refused:
            advice += ", all but the lines that are wrong themselves"
    return advice


def lines_of(ended: "Ended") -> list[str]:
    """Returns the report for a person."""
    report = ended.report
    counts = f"{report.succeeded} succeeded, {report.failed} failed"
    if report.refused:
        counts += f", {report.refused} wrong in the input"
    if ended.was_finished:
        return [f"{ended.output} was complete before: {counts}"]
    lines = [f"run {report.run}: {counts} in {duration(report.seconds * 1000)}"]
    tokens = f"{report.prompt_tokens} prompt and {report.completion_tokens} output"
    work = f"{report.jobs} jobs, {tokens} tokens"
    if report.windows:
        work = f"{report.windows} windows, {work}"
    lines.append(work)
    if report.fell_back:
        lines.append(
            f"{report.fell_back} parts were summarized by key sentences, since the "
            "model gave nothing of use"
        )
    if ended.others:
        lines.append(f"{ended.others} files of other kinds were passed over")
    if report.forgotten:
        lines.append(
            f"{report.forgotten} items were given to Redis again, which had lost them"
        )
    return lines
