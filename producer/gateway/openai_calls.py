"""The way of a request of OpenAI's form, from its body to its answer or stream.

The two forms differ in what reads a body (`ENDPOINTS`), what answers it (`answer`) and
what writes its chunks (`writer_of`).
"""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from ...shared.errors import TokenmillError
from ..openai_answers import usage_of
from ..openai_chunks import ChatChunks, ChunkWriter, CompletionChunks
from ..openai_form import ENDPOINTS, Body, answer, param_of
from ..openai_requests import ChatBody
from .context import Gateway
from .documented import StructResponse
from .errors import as_api_error
from .running import Running
from .sse import DONE, EventStream, Source, event
from .submitting import submit


@contextmanager
def openai_errors() -> Iterator[None]:
    """Names fields in errors as OpenAI does."""
    try:
        yield
    except TokenmillError as error:
        raise as_api_error(error, param_of) from error


async def answered(request: Request, owner: Gateway, url: str) -> Response:
    """Runs a request and answers it, whole or as a stream of server-sent events.

    Args:
        request: One whose caller is known.
        owner: The gateway.
        url: Path of the endpoint: decides the form.

    Raises:
        ApiError: It was refused, did not succeed, or its client left.
    """
    with openai_errors():
        body = ENDPOINTS[url](await request.body())
        running = await submit(request, owner, body)
        if body.stream:
            return EventStream(owner, events_of(running, body), running.headers)
        results = await running.results(request)
    whole = answer(body, results, created=running.created, spell=running.spell)
    return StructResponse(whole, headers=running.headers)


async def events_of(running: Running, body: Body) -> Source:
    """Yields the chunks of a stream, its count of tokens if that is wanted, its end."""
    writer, choices = writer_of(running, body), body.n or 1
    encode: Any = msgspec.json.encode
    # Closed here and not by the collector: leaving early cancels what goes on.
    with openai_errors():
        async with aclosing(running.deltas()) as deltas:
            async for index, delta in deltas:
                for chunk in writer.of(delta, index * choices):
                    yield event(encode(chunk))
    if body.wants_usage:
        counted = usage_of(end.usage for end in running.ends.values())
        yield event(encode(writer.usage(counted)))
    yield DONE


def writer_of(running: Running, body: Body) -> ChunkWriter:
    """Returns what writes the chunks of a stream."""
    writes = ChatChunks if isinstance(body, ChatBody) else CompletionChunks
    return writes(
        running.jobs[0].id,
        body.model,
        created=running.created,
        version=running.version,
        with_usage=body.wants_usage,
        spell=running.spell,
    )
