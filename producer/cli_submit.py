"""`tokenmill submit`: one prompt in, its text out."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypedDict

import msgspec
import typer

from ..shared.cli_support import handle_errors
from ..shared.errors import TokenmillError
from ..shared.messages import DEFAULT_TENANT, JobClass
from .cli_following import Following, follow
from .cli_input import (
    ControlTokens,
    build_prompt,
    check_seconds,
    parse_logit_bias,
    read_content,
)
from .cli_output import print_json, print_note

if TYPE_CHECKING:
    from ..shared.messages import Prompt
    from .job import Job
    from .submit import WhenFull, WhenUnserved

_SAMPLING = "Sampling"
_QUEUEING = "Queueing"
_OUTPUT = "Output"

_REPLY_S: Final = 2.0
"""How long an interrupted command waits for the reply to its enqueueing."""


class _Room(TypedDict, total=False):
    """What to do when the queue, or the workers, cannot take the job now."""

    when_full: "WhenFull"
    when_unserved: "WhenUnserved"
    wait_s: float | None


Number = Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)]
Real = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)]


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
    model: Annotated[
        str | None, typer.Option(help="Default: the only one of the pool.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="A LoRA adapter of the model (`lora list`).")
    ] = None,
    model_version: Annotated[
        str | None, typer.Option(help="Only this version of the model may run it.")
    ] = None,
    control_tokens: Annotated[
        ControlTokens | None,
        typer.Option(help="What to do where the text spells a control token."),
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
    not_before: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_QUEUEING,
            help="When it is queued: a time with its zone, as 2030-01-31T08:00:00Z.",
        ),
    ] = None,
    refuse_late: Annotated[
        bool,
        typer.Option(
            "--refuse-late",
            rich_help_panel=_QUEUEING,
            help="Refuse it now if it cannot meet its deadline.",
        ),
    ] = False,
    webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=_QUEUEING,
            help="Tell this address of the end.",
        ),
    ] = None,
    wait_for_room: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_QUEUEING,
            help="Seconds to wait when the queue is full; default: it is an error.",
            callback=check_seconds,
        ),
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
            "--keep", rich_help_panel=_OUTPUT, help="Ctrl-C leaves the job alone."
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            rich_help_panel=_OUTPUT,
            help="Seconds to wait for the end.",
            callback=check_seconds,
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
        "adapter": adapter,
        "version": model_version,
        "control_tokens": control_tokens,
        "job_class": job_class,
        "tenant": tenant,
        "priority": priority,
        "idempotency_key": idempotency_key,
        "deadline_s": deadline,
        "delay_s": delay,
        "not_before": not_before,
        "refuse_late": refuse_late or None,
        "webhook": webhook,
    }
    prompt = build_prompt(
        read_content(text, file, chat=chat, system=system),
        {**queueing, "sampling": sampling},
    )
    following = Following(
        stream=stream, wait=wait, keep=keep, timeout_s=timeout_s, as_json=as_json
    )
    room: _Room = {"when_full": "raise" if wait_for_room is None else "wait"}
    room |= {"wait_s": wait_for_room}
    room |= {"when_unserved": "wait" if wait_for_worker else "refuse"}
    await _run(prompt, url, following, room, any_model=model is None)


async def _run(
    prompt: "Prompt",
    url: str | None,
    following: Following,
    room: _Room,
    *,
    any_model: bool,
) -> None:
    from .client import Client

    async with Client(url) as mill:
        if any_model:
            name = await mill.session.patiently(mill.session.view.default_model)
            prompt = msgspec.structs.replace(prompt, model=name)
        enqueueing = asyncio.ensure_future(mill.submit(prompt, **room))
        try:
            # Shielded: a job that is in the queue without our knowing its id could
            # be neither named nor cancelled.
            job = await asyncio.shield(enqueueing)
            if not following.wait:
                _print_id(job, as_json=following.as_json)
                return
            await follow(job, following, prompt.sampling.n)
        except TokenmillError:
            raise  # a time-out is an OSError as well, and leaves the job alone
        except (asyncio.CancelledError, OSError):
            await _leave(enqueueing, keep=following.keep)
            raise


async def _leave(enqueueing: "asyncio.Future[Job]", *, keep: bool) -> None:
    """Says what becomes of the job when nobody waits for it any more."""
    await asyncio.wait([enqueueing], timeout=_REPLY_S)
    if not enqueueing.done():
        enqueueing.cancel()
        print_note("\nRedis did not answer: the job may be in the queue, or not")
        return
    job = enqueueing.result()
    if keep:
        print_note(f"\njob goes on; see it with: tokenmill tail {job.id}")
    else:
        print_note(f"\njob {job.id}: {await job.cancel()}")


def _print_id(job: "Job", *, as_json: bool) -> None:
    if as_json:
        print_json({"id": job.id, "duplicate": job.duplicate})
    else:
        print(job.id, flush=True)
