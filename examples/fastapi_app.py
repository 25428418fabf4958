"""Enqueue from FastAPI: the request returns at once, the answer is followed apart.

    uvicorn fastapi_app:app --port 8000
    curl -d '{"text": "Why is the sky blue?"}' -H 'content-type: application/json' \
         http://127.0.0.1:8000/answers
    curl -N http://127.0.0.1:8000/answers/<id>/text

Start a pool first: `tokenmill up`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from tokenmill import Client, Message, Prompt, Sampling
from tokenmill.shared.errors import JobFailed, QueueFull, UnknownJob

MODEL = os.environ.get("MODEL", "smollm2-135m")


class Question(BaseModel):
    """What a user asks."""

    text: str = Field(min_length=1, max_length=4000)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for the whole process: its connections are shared by all requests."""
    async with Client() as app.state.mill:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/answers", status_code=202)
async def ask(question: Question, request: Request) -> dict[str, str]:
    """Queues the question; a full queue is told to the user, not waited for."""
    mill: Client = request.app.state.mill
    # Messages go through the model's chat template: a question is answered, where a
    # bare text would be gone on with.
    prompt = Prompt(
        messages=(Message("user", question.text),),
        model=MODEL,
        sampling=Sampling(max_tokens=64),
    )
    try:
        job = await mill.submit(prompt, when_full="raise")
    except QueueFull as error:
        retry = str(max(1, round(error.retry_after_s)))
        raise HTTPException(503, "busy", {"Retry-After": retry}) from error
    return {"id": job.id}


@app.get("/answers/{job_id:path}/text")
async def follow(job_id: str, request: Request) -> StreamingResponse:
    """Passes the answer on as it is written, from its beginning, to any number."""
    try:
        job = request.app.state.mill.job(job_id)
        await job.info()  # asked before the answer begins: then it is too late for 404
    except UnknownJob as error:
        raise HTTPException(404, "no such answer") from error

    async def pieces() -> AsyncIterator[str]:
        async for delta in job.stream():
            yield delta.text

    return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")


@app.get("/answers/{job_id:path}")
async def look(job_id: str, request: Request) -> dict[str, object]:
    """The state of an answer, and the whole of it once it is there."""
    try:
        job = request.app.state.mill.job(job_id)
        if not await job.done():
            return {"id": job_id, "state": (await job.info()).state}
        result = await job.result()
    except UnknownJob as error:
        raise HTTPException(404, "no such answer") from error
    except JobFailed as error:
        return {"id": job_id, "state": "failed", "error": str(error)}
    return {"id": job_id, "state": result.state, "text": result.text}
