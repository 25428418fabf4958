"""Enqueue from blocking code, as views of Django or Flask are: plain WSGI here.

    python sync_app.py 8000
    curl -d 'Why is the sky blue?' http://127.0.0.1:8000/
    curl http://127.0.0.1:8000/<id>

In Django the two functions below are views, with `request.body` for the text and
`JsonResponse` for what they return. Start a pool first: `tokenmill up`.
"""

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import make_server

from tokenmill import Message, Prompt, Sampling, SyncClient
from tokenmill.shared.errors import InvalidRequest, JobFailed, QueueFull, UnknownJob

MODEL = os.environ.get("MODEL", "smollm2-135m")
Answer = tuple[str, dict[str, object]]
"""Status line and what becomes JSON."""


@functools.cache
def mill() -> SyncClient:
    """One client for the process; any thread may use it. It is made at the first
    request, so that servers which fork do so before it has connections.
    """
    client = SyncClient()
    client.open()
    atexit.register(client.close)
    return client


def enqueue(text: str) -> Answer:
    """Queues a question and returns at once."""
    try:
        # Messages go through the model's chat template: a question is answered, where
        # a bare text would be gone on with.
        prompt = Prompt(
            messages=(Message("user", text),),
            model=MODEL,
            sampling=Sampling(max_tokens=64),
        )
        job = mill().submit(prompt, when_full="raise")
    except InvalidRequest as error:
        return "400 Bad Request", {"error": str(error)}
    except QueueFull as error:
        return "503 Service Unavailable", {"error": str(error)}
    return "202 Accepted", {"id": job.id}


def look(job_id: str) -> Answer:
    """The answer to a question, or that it is not there yet."""
    try:
        job = mill().job(job_id)
        if not job.done():
            return "200 OK", {"id": job_id, "state": job.info().state}
        result = job.result()
    except UnknownJob as error:
        return "404 Not Found", {"error": str(error)}
    except JobFailed as error:
        return "200 OK", {"id": job_id, "state": "failed", "error": str(error)}
    return "200 OK", {"id": job_id, "state": result.state, "text": result.text}


def application(
    environ: dict[str, Any], start_response: Callable[..., object]
) -> Iterable[bytes]:
    """POST / with a text, GET /<id>."""
    if environ["REQUEST_METHOD"] == "POST":
        size = int(environ.get("CONTENT_LENGTH") or 0)
        status, body = enqueue(environ["wsgi.input"].read(size).decode())
    else:
        status, body = look(environ["PATH_INFO"].removeprefix("/"))
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps(body).encode() + b"\n"]


if __name__ == "__main__":
    with make_server("127.0.0.1", int(sys.argv[1]), application) as server:
        server.serve_forever()
