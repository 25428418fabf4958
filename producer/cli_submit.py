"""`tokenmill submit`: one prompt in, its text out."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..shared.cli_support import handle_errors
from ..shared.messages import DEFAULT_MODEL, DEFAULT_TENANT, JobClass
from .cli_input import build_prompt, parse_logit_bias, read_content
from .cli_output import DeltaPrinter, print_json, print_note, print_result

if TYPE_CHECKING:
    from ..shared.messages import Prompt
    from .job import Job

_SAMPLING = "Sampling"
_QUEUEING = "Queueing"
_OUTPUT = "Output"

Number = Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)]
Real = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)]


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """How the command goes on once the job is in the queue."""

    stream: bool
    wait: bool
    keep: bool
    timeout_s: float | None
    as_json: bool


def register_submit(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("submit")(submit)


@handle_errors
async def submit(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file in UTF-8.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Send the text as a user's chat message.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="A system message before it; implies --chat.")
    ] = None,
    model: str = DEFAULT_MODEL,
    control_tokens: Annotated[
        str | None,
        typer.Option(help="Text that spells control tokens: refuse, as_text or allow."),
    ] = None,
    max_tokens: Number = None,
    min_tokens: Number = None,
    temperature: Real = None,
    top_p: Real = None,
    top_k: Number = None,
    min_p: Real = None,
    seed: Number = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SAMPLING, help="A stop string; repeatable."),
    ] = None,
    stop_id: Annotated[
        list[int] | None,
        typer.Option(rich_help_panel=_SAMPLING, help="A stop token id; repeatable."),
    ] = None,
    logprobs: Number = None,
    n: Annotated[
        int | None, typer.Option("--n", rich_help_panel=_SAMPLING, help="Choices.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(rich_help_panel=_SAMPLING)] = False,
    repetition_penalty: Real = None,
    presence_penalty: Real = None,
    frequency_penalty: Real = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SAMPLING, help="ID=VALUE; repeatable."),
    ] = None,
    job_class: Annotated[
        JobClass, typer.Option("--class", rich_help_panel=_QUEUEING)
    ] = JobClass.INTERACTIVE,
    tenant: Annotated[str, typer.Option(rich_help_panel=_QUEUEING)] = DEFAULT_TENANT,
    priority: Annotated[
        int | None,
        typer.Option(rich_help_panel=_QUEUEING, help="Smaller is more urgent."),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(rich_help_panel=_QUEUEING, help="The same key is the same job."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(rich_help_panel=_QUEUEING, help="Seconds until it expires."),
    ] = None,
    delay: Annotated[
        float | None,
        typer.Option(rich_help_panel=_QUEUEING, help="Seconds until it is queued."),
    ] = None,
    wait_for_worker: Annotated[
        bool,
        typer.Option(
            "--wait-for-worker",
            rich_help_panel=_QUEUEING,
            help="Queue even when no worker serves the model.",
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option("--stream", rich_help_panel=_OUTPUT, help="Print as it comes."),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(rich_help_panel=_OUTPUT, help="Await the end, or print the id."),
    ] = True,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep", rich_help_panel=_OUTPUT, help="Ctrl-C leaves the job running."
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout", rich_help_panel=_OUTPUT, help="Seconds to wait for the end."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The pool's Redis; default: find it.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel=_OUTPUT, help="One JSON object a line."),
    ] = False,
) -> None:
    """Submit a prompt and print what the model answers."""
    sampling = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_id,
        "logprobs": logprobs,
        "n": n,
        "ignore_eos": ignore_eos or None,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": parse_logit_bias(logit_bias or []),
    }
    queueing = {
        "model": model,
        "control_tokens": control_tokens,
        "job_class": job_class,
        "tenant": tenant,
        "priority": priority,
        "idempotency_key": idempotency_key,
        "deadline_s": deadline,
        "delay_s": delay,
    }
    prompt = build_prompt(
        read_content(text, file, chat=chat, system=system),
        {**queueing, "sampling": sampling},
    )
    following = Following(
        stream=stream, wait=wait, keep=keep, timeout_s=timeout_s, as_json=as_json
    )
    await _run(prompt, url, following, wait_for_worker=wait_for_worker)


async def _run(
    prompt: "Prompt", url: str | None, following: Following, *, wait_for_worker: bool
) -> None:
    from .client import Client

    async with Client(url) as mill:
        job = await mill.submit(
            prompt, when_unserved="wait" if wait_for_worker else "refuse"
        )
        if not following.wait:
            _print_id(job, as_json=following.as_json)
            return
        try:
            await _follow(job, following, prompt.sampling.n)
        except (asyncio.CancelledError, BrokenPipeError):
            if following.keep:
                print_note(f"\njob goes on; see it with: tokenmill tail {job.id}")
            else:
                state = await job.cancel()
                print_note(f"\njob {job.id}: {state}")
            raise


def _print_id(job: "Job", *, as_json: bool) -> None:
    if as_json:
        print_json({"id": job.id, "duplicate": job.duplicate})
    else:
        print(job.id)


async def _follow(job: "Job", following: Following, num_choices: int) -> None:
    from ..shared.errors import ResultTimeout

    if not following.stream:
        result = await job.result(following.timeout_s)
        print_result(result, as_json=following.as_json)
        return
    if following.as_json:
        print_json({"id": job.id, "duplicate": job.duplicate})
    try:
        async with asyncio.timeout(following.timeout_s):
            await print_stream(job, 0, num_choices, as_json=following.as_json)
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
        JobFailed: After the last delta of a job that did not succeed.
    """
    printer = DeltaPrinter(as_json=as_json, num_choices=num_choices)
    try:
        async with job.stream(from_offset) as deltas:
            async for delta in deltas:
                printer.write(delta)
    finally:
        printer.close()
    if as_json:
        print_json(await job.result())
