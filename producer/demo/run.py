"""Submits the demo's prompts, streams one, tabulates all."""

import time

import msgspec
from rich.console import Console
from rich.table import Table

from ...shared.messages import JobResult
from ..client import Client
from ..info import JobInfo
from ..job import Job
from .pool_process import demo_pool
from .prompts import demo_prompts


class Row(msgspec.Struct, frozen=True):
    """One finished job: its record and its result."""

    info: JobInfo
    result: JobResult


async def run_demo(model: str, console: Console) -> None:
    """Starts a pool, runs a dozen prompts through it, stops it.

    Args:
        model: Public name of the model to ask.
        console: Where everything is shown.

    Raises:
        TokenmillError: Something in the way failed; nothing is left running.
    """
    console.rule("[bold]a pool on this machine")

    def show(line: str) -> None:
        console.print(line, style="dim", markup=False, highlight=False)

    async with demo_pool(model, show) as mill:
        console.rule("[bold]a dozen prompts, one of them live")
        begin = time.monotonic()
        prompts = [msgspec.structs.replace(p, model=model) for p in demo_prompts()]
        jobs = await mill.submit_many(prompts)
        await _stream(
            jobs[0],
            str(prompts[0].messages and prompts[0].messages[-1].content),
            console,
        )
        rows = await _collect(mill, jobs, console)
        elapsed = time.monotonic() - begin
        console.rule("[bold]what they cost")
        console.print(_table(rows))
        console.print(
            f"\nqueue ms and TTFT ms count from enqueueing. All {len(rows)} were "
            "enqueued at once, so both include waiting behind the others.",
            style="dim",
        )
        _totals(rows, elapsed, console)
        console.rule("[bold]stopping")
    console.print("everything stopped; nothing is left running")


async def _stream(job: Job, question: str, console: Console) -> None:
    console.print(f"[bold cyan]{question}[/]")
    async for delta in job.stream():
        console.print(delta.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()


async def _collect(mill: Client, jobs: list[Job], console: Console) -> list[Row]:
    rows = {}
    async for job in mill.as_completed(jobs):
        rows[job.id] = Row(await job.info(), await job.result())
        console.print(f"  {len(rows):2} of {len(jobs)} finished", style="dim")
    return [rows[job.id] for job in jobs]


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("class")
    for name in ("bucket", "prompt", "output", "queue ms", "TTFT ms", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("finish")
    for row in rows:
        timings, usage = row.result.timings, row.result.usage
        decode_ms = (timings.total_ms or 0) - (timings.ttft_ms or 0)
        rate = 1000 * (usage.completion_tokens - 1) / decode_ms if decode_ms > 0 else 0
        table.add_row(
            *(row.info.job_class, row.info.bucket, str(usage.prompt_tokens)),
            *(str(usage.completion_tokens), f"{timings.queued_ms or 0:.0f}"),
            *(f"{timings.ttft_ms or 0:.0f}", f"{rate:.1f}"),
            row.result.choices[0].finish_reason,
        )
    return table


def _totals(rows: list[Row], elapsed_s: float, console: Console) -> None:
    prompt_tokens = sum(r.result.usage.prompt_tokens for r in rows)
    output_tokens = sum(r.result.usage.completion_tokens for r in rows)
    console.print(
        f"\n[bold]{len(rows)} jobs[/] in {elapsed_s:.1f} s: {prompt_tokens} prompt "
        f"tokens, {output_tokens} output tokens, "
        f"[bold]{output_tokens / elapsed_s:.1f} output tokens/s[/] and "
        f"{(prompt_tokens + output_tokens) / elapsed_s:.0f} tokens/s in all"
    )
