"""Users of the HTTP gateway for Locust.

    locust -f bench/locustfile.py --headless -u 16 -r 4 -t 60s -H http://127.0.0.1:8080

Each user reads an answer as it comes, pauses as a reader does, and asks again; one in
four takes it whole. `TTFT` rows are the time to the first text of a streamed answer,
`gap` rows that between deliveries. Variables: TOKENMILL_BENCH_MODEL,
TOKENMILL_BENCH_KEY (an API key), TOKENMILL_BENCH_MAX_TOKENS, TOKENMILL_BENCH_PAUSE_S.
"""

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from locust import HttpUser, between, events, task

_WORKLOAD = Path(__file__).parent / "workloads" / "mixed.jsonl"
_MODEL = os.environ.get("TOKENMILL_BENCH_MODEL", "smollm2-135m")
_MAX_TOKENS = int(os.environ.get("TOKENMILL_BENCH_MAX_TOKENS", "32"))
_PAUSE_S = float(os.environ.get("TOKENMILL_BENCH_PAUSE_S", "2"))


def _prompts() -> Iterator[str]:
    lines = _WORKLOAD.read_text(encoding="utf-8").splitlines()
    return itertools.cycle([json.loads(line)["prompt"] for line in lines])


class Reader(HttpUser):
    """Someone who asks, reads, and asks again."""

    wait_time = between(_PAUSE_S / 2, _PAUSE_S)
    _prompt = _prompts()

    def on_start(self) -> None:
        """Shows its key, where there is one."""
        key = os.environ.get("TOKENMILL_BENCH_KEY")
        if key:
            self.client.headers["Authorization"] = f"Bearer {key}"

    def _body(self, **more: object) -> dict[str, object]:
        prompt = next(self._prompt)
        return {"model": _MODEL, "prompt": prompt, "max_tokens": _MAX_TOKENS, **more}

    @task(3)
    def stream(self) -> None:
        """Reads an answer as it comes."""
        begin = time.monotonic()
        last: float | None = None
        path = "/v1/completions"
        call = self.client.post(
            path, json=self._body(stream=True), stream=True, catch_response=True,
            name=f"{path} (stream)",
        )  # fmt: skip
        with call as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            line = ""
            for raw in response.iter_lines():
                line = raw.decode()
                event = _event(line)
                if "error" in event:
                    response.failure(line)
                    return
                if any(choice.get("text") for choice in event.get("choices", ())):
                    now = time.monotonic()
                    waited = now - (begin if last is None else last)
                    _note("TTFT" if last is None else "gap", path, waited)
                    last = now
            if last is None:
                response.failure(f"the stream ended without text: {line[:200]}")
            else:
                response.success()

    @task(1)
    def whole(self) -> None:
        """Takes an answer whole."""
        self.client.post("/v1/completions", json=self._body())


def _event(line: str) -> dict[str, Any]:
    """The object of one line of the stream; empty for a line without one."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return {}
    found: dict[str, Any] = json.loads(line[6:])
    return found


def _note(kind: str, name: str, seconds: float) -> None:
    events.request.fire(
        request_type=kind,
        name=name,
        response_time=seconds * 1000,
        response_length=0,
        exception=None,
        context={},
    )
