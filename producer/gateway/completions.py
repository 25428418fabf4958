"""POST /v1/completions."""

from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from ...shared.api_keys import Scope
from ..openai_answers import Completion, completion_answer
from ..openai_chunks import CompletionChunk
from ..openai_requests import CompletionBody, decode_completion
from .auth import Caller, require
from .context import Gateway, gateway
from .documented import StructResponse
from .openai_calls import (
    documented,
    openai_errors,
    taken,
    total_usage,
    writer_of,
)
from .running import Running
from .sse import DONE, EventStream, Source, event
from .submitting import submit

router = APIRouter(tags=["openai"])
_ASKED: Final[dict[str, object]] = {
    "model": "smollm2-135m",
    "prompt": "The sky is blue because",
    "max_tokens": 32,
    "priority": -5,
}
_ANSWERED: Final[dict[str, object]] = {
    "id": "cmpl-smollm2-135m.0.0199a1b2c3d4e5f60718293a4b5c6d7",
    "object": "text_completion",
    "created": 1767225600,
    "model": "smollm2-135m",
    "choices": [
        {"index": 0, "text": " air scatters blue light.", "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
}


@router.post(
    "/v1/completions",
    response_class=Response,
    responses=documented(Completion, CompletionChunk, _ANSWERED),
    openapi_extra=taken(CompletionBody, _ASKED),
)
async def completions(
    request: Request,
    _caller: Annotated[Caller, Depends(require(Scope.INFERENCE))],
    owner: Annotated[Gateway, Depends(gateway)],
) -> Response:
    """Goes on with one or more texts, whole or as a stream of server-sent events.

    Each prompt is a job. Choices are numbered through: those of the first prompt, of
    the second, and so on. A client that leaves cancels its jobs.
    """
    with openai_errors():
        body = decode_completion(await request.body())
        running = await submit(request, owner, body)
        if body.stream:
            return EventStream(owner, _events(running, body), running.headers)
        results = await running.results(request)
    whole = completion_answer(results, created=running.created, spell=running.spell)
    return StructResponse(whole, headers=running.headers)


async def _events(running: Running, body: CompletionBody) -> Source:
    writer = writer_of(running, body)
    encode: Any = msgspec.json.encode
    choices = body.n or 1
    # Closed here and not by the collector: leaving early cancels what goes on.
    with openai_errors():
        async with aclosing(running.deltas()) as deltas:
            async for index, delta in deltas:
                for chunk in writer.completion(delta, index * choices):
                    yield event(encode(chunk))
    if body.wants_usage:
        yield event(encode(writer.completion_usage(total_usage(running))))
    yield DONE
