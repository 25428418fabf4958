"""What becomes of a request that fails, before its answer and amid it."""

import json

import pytest
import structlog

from tokenmill.producer.gateway.request_log import RequestLog


async def answered(app) -> tuple[list[dict], list[dict]]:
    """Messages that are sent, and lines that are logged, for one request."""
    sent: list[dict] = []
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}

    async def receive() -> dict:
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    with structlog.testing.capture_logs() as lines:
        await RequestLog(app)(scope, receive, send)
    return sent, lines


@pytest.mark.parametrize("error", [OSError("no space left"), TimeoutError()])
async def test_an_error_before_the_answer_is_told_and_logged(error) -> None:
    async def app(_scope, _receive, _send) -> None:
        raise error

    sent, lines = await answered(app)
    assert sent[0]["status"] == 500
    told = json.loads(sent[1]["body"])["error"]
    assert told["code"] == "internal_error"
    assert [line["event"] for line in lines] == ["unexpected_error", "http_request"]


@pytest.mark.parametrize(
    ("error", "ended"),
    [(ConnectionResetError(), "client_left"), (TimeoutError(), "slow_client")],
)
async def test_an_error_amid_the_answer_is_the_clients(error, ended) -> None:
    async def app(_scope, _receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    sent, lines = await answered(app)
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert [(line["event"], line["ended"]) for line in lines] == [
        ("http_request", ended)
    ]
