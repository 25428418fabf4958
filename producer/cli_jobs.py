"""`tokenmill tail`, `jobs`, `show` and `cancel`: looking at what is there."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ..shared.cli_support import handle_errors
from ..shared.lifecycle import TERMINAL, State
from .cli_following import print_stream
from .cli_options import AsJson, Url, client_of
from .cli_output import (
    JOB_HEADER,
    JOB_SPARE,
    clock,
    duration,
    job_row,
    print_facts,
    print_json,
    print_note,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from ..shared.messages import AdapterRef, JobResult
    from .info import JobInfo

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id.")]


def register_job_commands(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("tail")(tail)
    app.command("jobs")(jobs)
    app.command("show")(show)
    app.command("cancel")(cancel)


@handle_errors
async def tail(
    job: JobArgument,
    from_offset: Annotated[
        int, typer.Option("--from", min=0, help="First output token wanted.")
    ] = 0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Print a job's output: what there is so far, then as it comes."""
    async with client_of(url) as mill:
        await print_stream(mill.job(job), from_offset, 1, as_json=as_json)


@handle_errors
async def jobs(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most jobs.")] = 20,
    state: Annotated[
        State | None, typer.Option(help="Only jobs in this state.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the newest jobs of the pool."""
    async with client_of(url) as mill:
        found = await mill.jobs(limit, state)
    if as_json:
        for info in found:
            print_json(info)
        return
    # Ages compare this machine's clock with that of Redis: for reading only.
    now_ms = time.time() * 1000
    rows = [job_row(info, now_ms) for info in found]
    print_table(JOB_HEADER, rows, JOB_SPARE)
    for info in found:
        if info.problem is not None:
            print_note(f"unreadable: {info.id[:120]!r}: {info.problem}")


@handle_errors
async def show(job: JobArgument, url: Url = None, as_json: AsJson = False) -> None:
    """Show a job's record and, once it has ended, its result."""
    from ..shared.errors import JobFailed
    from .standing import adapter_of

    async with client_of(url) as mill:
        handle = mill.job(job)
        info = await handle.info()
        adapter = await adapter_of(mill.session, handle.job_id)
        result = None
        if info.state in TERMINAL:
            try:
                result = await handle.result()
            except JobFailed:
                result = handle.outcome  # shown below, with its error
    if as_json:
        print_json({"job": info, "adapter": adapter, "result": result})
        return
    print_facts(_facts(info, adapter, result))
    for choice in result.choices if result else ():
        print(f"\n[{choice.index}] {choice.finish_reason}")
        print_text(f"{choice.text}\n")


def _facts(
    info: "JobInfo", adapter: "AdapterRef | None", result: "JobResult | None"
) -> list[tuple[str, str]]:
    facts = [
        ("job", info.id),
        ("state", info.state + (", cancelling" if _cancelling(info) else "")),
        ("model", info.model),
        ("version", _version(info, result)),
        ("adapter", _adapter(info, adapter)),
        ("class", info.job_class),
        ("tenant", info.tenant),
        ("priority", str(info.priority)),
        ("bucket", info.bucket),
        ("prompt", f"{info.prompt_tokens} tokens"),
        ("seed", str(info.seed)),
        ("worker", info.owner or "-"),
        ("attempts", f"{info.attempts} faults, {info.lease_losses} lost leases"),
        ("enqueued", clock(info.enqueued_ms)),
        ("started", clock(info.started_ms)),
        ("finished", clock(info.finished_ms)),
    ]
    if info.last_error:
        facts.append(("last error", info.last_error))
    if result is not None:
        facts.append(("output", f"{result.usage.completion_tokens} tokens"))
        timings = result.timings
        facts += [
            (name, duration(value))
            for name, value in (
                ("queue time", timings.queued_ms),
                ("first token", timings.ttft_ms),
                ("total time", timings.total_ms),
            )
            if value is not None
        ]
    if result is not None and result.error is not None:
        facts.append(("error", f"[{result.error.code}] {result.error.message}"))
    return facts


def _version(info: "JobInfo", result: "JobResult | None") -> str:
    """Which version served it, and whether it had to be that one."""
    served = (result.version if result else None) or info.version
    if info.pinned_version is None:
        return served or "-"
    return f"{served or '-'} (only {info.pinned_version})"


def _adapter(info: "JobInfo", adapter: "AdapterRef | None") -> str:
    """Which one, and with what content where the request is still there."""
    if adapter is None:
        return info.adapter or "-"
    return f"{adapter.name} ({adapter.digest[:12]})"


def _cancelling(info: "JobInfo") -> bool:
    return info.cancel_requested and info.state not in TERMINAL


@handle_errors
async def cancel(job: JobArgument, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a job that waits or runs."""
    async with client_of(url) as mill:
        answer = await mill.job(job).cancel()
    if as_json:
        print_json({"id": job, "state": answer})
    else:
        print(answer)
