"""From a body of OpenAI's form to jobs in the queue."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
from fastapi import Request

from ...shared.adapter_names import split_name
from ...shared.errors import InvalidBatch, InvalidRequest, TokenmillError
from ...shared.messages import ModelCard, Prompt
from ..job import Job
from ..openai_form import Body, Spell, prompts_of
from .options import options_of
from .request_log import JOBS
from .running import MOST_IDS, Running
from .sse import going_down

if TYPE_CHECKING:
    from .context import Gateway

_log = structlog.get_logger(__name__)


async def submit(request: Request, owner: "Gateway", body: Body) -> Running:
    """Submits the jobs of a request.

    Args:
        request: One whose caller is known.
        owner: The gateway.
        body: Its body.

    Raises:
        TokenmillError: It was refused; nothing goes on.
        ApiError: The gateway is going down.
    """
    if owner.draining.is_set():
        raise going_down()
    options = options_of(request, body)
    card = await owner.client.model_card(split_name(body.model)[0])
    spell = await _spell(owner, body, card)
    prompts = prompts_of(body, card.max_context if card else None)
    queued = [options.apply(one, index) for index, one in enumerate(prompts)]
    jobs = await _submit_all(owner, queued)
    request.scope[JOBS] = [job.id for job in jobs[:MOST_IDS]]
    return Running(
        owner,
        jobs,
        keep=options.keep_on_disconnect,
        version=card.weights_version if card else None,
        spell=spell,
    )


async def _spell(owner: "Gateway", body: Body, card: ModelCard | None) -> Spell | None:
    if body.logprobs is None or body.logprobs is False:
        return None
    # A model that nobody serves is an error of its own, which submitting raises.
    return None if card is None else await owner.token_texts.spell(card)


async def _submit_all(owner: "Gateway", prompts: Sequence[Prompt]) -> list[Job]:
    """Submits all of them or none."""
    if len(prompts) == 1:
        return [await owner.client.submit(prompts[0])]
    try:
        return await owner.client.submit_many(
            prompts, when_full="raise", is_one_request=True
        )
    except InvalidBatch as batch:
        index = min(batch.errors)
        error = batch.errors[index]
        field = f"prompt[{index}]" if error.field == "text" else error.field
        raise InvalidRequest(field, error.problem) from None
    except TokenmillError as error:
        for job_id in error.enqueued:
            try:
                await owner.client.job(job_id).cancel()
            except TokenmillError as failed:
                _log.warning("cancel_failed", job=job_id, code=failed.code)
        raise
