"""POST /v1/chat/completions."""

from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from ...shared.api_keys import Scope
from ..openai_answers import ChatCompletion, chat_answer
from ..openai_chunks import ChatCompletionChunk
from ..openai_requests import ChatBody, decode_chat
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
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 64,
}
_ANSWERED: Final[dict[str, object]] = {
    "id": "chatcmpl-smollm2-135m.0.0199a1b2c3d4e5f60718293a4b5c6d7",
    "object": "chat.completion",
    "created": 1767225600,
    "model": "smollm2-135m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Air scatters blue light."},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 36, "completion_tokens": 6, "total_tokens": 42},
}


@router.post(
    "/v1/chat/completions",
    response_class=Response,
    responses=documented(ChatCompletion, ChatCompletionChunk, _ANSWERED),
    openapi_extra=taken(ChatBody, _ASKED),
)
async def chat_completions(
    request: Request,
    _caller: Annotated[Caller, Depends(require(Scope.INFERENCE))],
    owner: Annotated[Gateway, Depends(gateway)],
) -> Response:
    """Answers a conversation, whole or as a stream of server-sent events.

    What is not supported is refused by name. A client that leaves cancels its job.
    """
    with openai_errors():
        body = decode_chat(await request.body())
        running = await submit(request, owner, body)
        if body.stream:
            return EventStream(owner, _events(running, body), running.headers)
        (result,) = await running.results(request)
    whole = chat_answer(result, created=running.created, spell=running.spell)
    return StructResponse(whole, headers=running.headers)


async def _events(running: Running, body: ChatBody) -> Source:
    writer = writer_of(running, body)
    encode: Any = msgspec.json.encode
    # Closed here and not by the collector: leaving early cancels what goes on.
    with openai_errors():
        async with aclosing(running.deltas()) as deltas:
            async for _, delta in deltas:
                for chunk in writer.chat(delta):
                    yield event(encode(chunk))
    if body.wants_usage:
        yield event(encode(writer.chat_usage(total_usage(running))))
    yield DONE
