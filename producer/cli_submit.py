"""`tokenmill submit`: one prompt in, its text out."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ..shared.cli_structs import with_structs
from ..shared.cli_support import handle_errors
from ..shared.errors import TokenmillError
from .cli_following import follow
from .cli_input import build_prompt
from .cli_options import Url, client_of
from .cli_output import print_json, print_note
from .cli_submit_options import (
    OUTPUT,
    Following,
    PromptOptions,
    QueueingOptions,
    Room,
    SamplingOptions,
)

if TYPE_CHECKING:
    from ..shared.messages import Prompt
    from .client import Client
    from .job import Job

_REPLY_S: Final = 2.0
"""How long an interrupted command waits for the reply to its enqueueing."""


def register_submit(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("submit")(submit)


@with_structs
@handle_errors
async def submit(
    *,
    asked: PromptOptions,
    sampling: SamplingOptions,
    queueing: QueueingOptions,
    following: Following,
    url: Url = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel=OUTPUT, help="One JSON object a line."),
    ] = False,
) -> None:
    """Submit a prompt and print what the model answers."""
    fields = {**asked.fields(), **queueing.fields(), "sampling": sampling.fields()}
    prompt = build_prompt(asked.content(), fields)
    async with client_of(url) as mill:
        if asked.model is None:
            name = await mill.session.patiently(mill.session.view.default_model)
            prompt = msgspec.structs.replace(prompt, model=name)
        await _submit(mill, prompt, queueing.room(), following, as_json=as_json)


async def _submit(
    mill: "Client",
    prompt: "Prompt",
    room: Room,
    following: Following,
    *,
    as_json: bool,
) -> None:
    enqueueing = asyncio.ensure_future(mill.submit(prompt, **room))
    try:
        # Shielded: a job that is in the queue without our knowing its id could be
        # neither named nor cancelled.
        job = await asyncio.shield(enqueueing)
        if following.wait:
            await follow(job, following, prompt.sampling.n, as_json=as_json)
        else:
            _print_id(job, as_json=as_json)
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
