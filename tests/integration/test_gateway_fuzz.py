"""Whatever the OpenAPI document allows is answered as it says, and never with a 500."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS
from support.gateway_thread import serving
from support.pools import MODEL, UpProcess, up

ENDLESS = "/v1/admin/events"
"""It answers for as long as someone listens."""
EXAMPLES, FEWEST = 6, 2
"""Of an operation; the fewest once the time is used up."""
BUDGET_S = 8.0
MOST_TOKENS = 16
CONFORMING = (
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with up(tmp_path_factory.mktemp("pool"), engine="echo") as running:
        yield running


@pytest.fixture(scope="module")
def document(pool: UpProcess, tmp_path_factory: pytest.TempPathFactory):
    files: Path = tmp_path_factory.mktemp("files")
    with serving(pool.url, files) as gateway:
        loaded = schemathesis.openapi.from_url(f"{gateway.base}/openapi.json")
        loaded.hook(map_body)
        yield loaded


def map_body(context, body):
    """Most requests name a model that is served, and none asks for a million tokens."""
    if isinstance(body, dict):
        if len(body.get("model") or "") % 4:
            body["model"] = MODEL
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], MOST_TOKENS)
        if isinstance(body.get("sampling"), dict):
            map_body(context, body["sampling"])
            body["sampling"]["max_tokens"] = MOST_TOKENS
    return body


def check(case) -> int:
    """Sends a request; returns the status of an answer that is as documented."""
    response = case.call(timeout=60)
    # 503 and 504 are told of: what is not there, or took too long.
    assert response.status_code < 500 or response.status_code in (503, 504), (
        f"{response.status_code} {response.text}"
    )
    case.validate_response(response, checks=CHECKS.get_by_names([*CONFORMING]))
    return response.status_code


def test_every_operation_answers_as_the_document_says(document) -> None:
    failures: list[str] = []
    seen: set[tuple[str, int]] = set()
    end = time.monotonic() + BUDGET_S
    for found in document.get_all_operations():
        operation = found.ok()
        if operation.path == ENDLESS:
            continue

        @settings(
            max_examples=EXAMPLES if time.monotonic() < end else FEWEST,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def run(case) -> None:
            seen.add((case.path, check(case)))

        try:
            run()
        except BaseException as error:  # noqa: BLE001 - groups of failures, too
            failures.append(f"{operation.method} {operation.path}: {error!r}")
    assert not failures, "\n\n".join(failures)
    succeeded = {path for path, status in seen if status == 200}
    assert {"/v1/completions", "/v1/models", "/v1/jobs"} <= succeeded


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_examples_of_the_document_work(document, path: str) -> None:
    operation = document[path]["POST"]
    body = operation.definition.raw["requestBody"]["content"]["application/json"]
    for stream in (False, True):
        example = {**body["example"], "model": MODEL, "stream": stream}
        assert check(operation.Case(body=example, media_type="application/json")) == 200
