"""The two ways into a pool that the load test compares: the client and HTTP."""

import json
import time
from typing import Protocol, Self

import httpx
from load_measure import Sample
from load_plan import Request

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.errors import TokenmillError

_SLOW_S = 600.0
"""A request may be this long on its way before it counts as failed."""


class Sender(Protocol):
    """A way to send one request and follow its output."""

    name: str

    async def send(self, request: Request, sample: Sample) -> None:
        """Sends a request and notes in `sample` what came back when."""


class Side(Sender, Protocol):
    """One that opens and closes its own connections."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class ClientSide:
    """`tokenmill.Client`, straight to Redis.

    Args:
        url: Of the pool's Redis.
        model: Its public name.
    """

    name = "client"

    def __init__(self, url: str, model: str) -> None:
        self._mill = Client(url)
        self._model = model

    async def send(self, request: Request, sample: Sample) -> None:
        """Submits and streams one job."""
        sampling = Sampling(max_tokens=request.max_tokens, ignore_eos=True)
        prompt = Prompt(request.prompt, model=self._model, sampling=sampling)
        words = 0
        try:
            job = await self._mill.submit(prompt)
            async for delta in job.stream():
                sample.tokens += len(delta.token_ids)
                if delta.text:  # a token may end within a character: nothing to read
                    sample.pieces.append(time.monotonic())
                    words += delta.text.count(" ")
        except TokenmillError as error:
            sample.error = error.code
        sample.words = words + 1
        sample.end = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._mill.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._mill.close()


class GatewaySide:
    """`POST /v1/completions` with server-sent events, over kept connections.

    Args:
        base: Address of the gateway, without a path.
        model: Its public name.
        key: An API key, where it asks for one.
    """

    name = "gateway"

    def __init__(self, base: str, model: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=base, headers=headers, limits=limits, timeout=_SLOW_S
        )
        self._model = model

    async def send(self, request: Request, sample: Sample) -> None:
        """Posts one request and reads its events."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        words = 0
        try:
            call = self._http.stream("POST", "/v1/completions", json=body)
            async with call as response:
                if response.status_code != httpx.codes.OK:
                    sample.error = f"http_{response.status_code}"
                else:
                    async for line in response.aiter_lines():
                        words += _note(line, sample)
        except httpx.HTTPError as error:
            sample.error = type(error).__name__
        sample.words = words + 1
        sample.end = time.monotonic()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def _note(line: str, sample: Sample) -> int:
    """Notes one line of the event stream; returns the words that it completed."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return 0
    event = json.loads(line[6:])
    if "error" in event:
        sample.error = str(event["error"].get("code") or event["error"].get("type"))
        return 0
    if event.get("usage"):
        sample.tokens = event["usage"]["completion_tokens"]
    text = "".join(choice.get("text", "") for choice in event.get("choices", ()))
    if text:
        sample.pieces.append(time.monotonic())
    return text.count(" ")
