"""POST /v1/completions and /v1/chat/completions: one way, two forms."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from ...shared.api_keys import Scope
from ..openai_answers import ChatCompletion, Completion
from ..openai_chunks import ChatCompletionChunk, CompletionChunk
from ..openai_form import CHAT_URL, COMPLETION_URL
from ..openai_requests import ChatBody, CompletionBody
from .auth import Caller, require
from .context import Gateway, gateway
from .documented_calls import documented, taken
from .openai_calls import answered

router = APIRouter(tags=["openai"])
_Caller = Annotated[Caller, Depends(require(Scope.INFERENCE))]
_Gateway = Annotated[Gateway, Depends(gateway)]
_PROMPT: Final[dict[str, object]] = {
    "model": "smollm2-135m",
    "prompt": "The sky is blue because",
    "max_tokens": 32,
    "priority": -5,
}
_COMPLETION: Final[dict[str, object]] = {
    "id": "cmpl-smollm2-135m.0.0199a1b2c3d4e5f60718293a4b5c6d7",
    "object": "text_completion",
    "created": 1767225600,
    "model": "smollm2-135m",
    "choices": [
        {"index": 0, "text": " air scatters blue light.", "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11},
}
_MESSAGES: Final[dict[str, object]] = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 64,
}
_CHAT: Final[dict[str, object]] = {
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
    COMPLETION_URL,
    response_class=Response,
    responses=documented(Completion, CompletionChunk, _COMPLETION),
    openapi_extra=taken(CompletionBody, _PROMPT),
)
async def completions(request: Request, _caller: _Caller, owner: _Gateway) -> Response:
    """Goes on with one or more texts, whole or as a stream of server-sent events.

    Each prompt is a job. Choices are numbered through: those of the first prompt, of
    the second, and so on. A client that leaves cancels its jobs.
    """
    return await answered(request, owner, COMPLETION_URL)


@router.post(
    CHAT_URL,
    response_class=Response,
    responses=documented(ChatCompletion, ChatCompletionChunk, _CHAT),
    openapi_extra=taken(ChatBody, _MESSAGES),
)
async def chat_completions(
    request: Request, _caller: _Caller, owner: _Gateway
) -> Response:
    """Answers a conversation, whole or as a stream of server-sent events.

    What is not supported is refused by name. A client that leaves cancels its job.
    """
    return await answered(request, owner, CHAT_URL)
