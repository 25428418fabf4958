"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

Clients decide by status and `type`; `code` says more than the status does, and is the
wire name of our error where there is one.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...shared.errors import (
    InvalidRequest,
    JobCancelled,
    JobExpired,
    JobFailed,
    ModelUnavailable,
    QueueFull,
    TokenmillError,
)

RETRY_S: Final = 2
"""When a retry has a chance, where nothing better is known: a restart takes so long."""

_STATUS: Final[Mapping[str, int]] = {
    "invalid_request": 400,
    "invalid_batch": 400,
    "prompt_too_long": 400,
    "control_tokens_in_text": 400,
    "input_unreadable": 400,
    "payload_too_large": 413,
    "idempotency_conflict": 409,
    "queue_full": 429,
    "deadline_unreachable": 422,
    "model_unavailable": 503,
    "unknown_adapter": 404,
    "adapter_unavailable": 503,
    "unknown_job": 404,
    "unknown_run": 404,
    "cancelled": 499,
    "job_cancelled": 499,
    "expired": 504,
    "job_expired": 504,
    "result_timeout": 504,
    "storage_unavailable": 503,
    "redis_unavailable": 503,
    "redis_unsuitable": 503,
    "newer_schema": 503,
    "invalid_config": 500,
}
"""Wire name of an error -> HTTP status; any other is 500."""
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_NOT_OURS: Final = 500


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    """The field at fault, if one is."""
    code: str | None = None
    """What exactly is wrong, in one word."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer that is no success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is no success.

    Args:
        status: HTTP status.
        message: What was wrong, what was expected, what to do.
        type: OpenAI's kind of error; None takes that of the status.
        code: What exactly is wrong, in one word.
        param: The field at fault, if one is.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.detail = ErrorDetail(
            message=message, type=type or type_of(status), param=param, code=code
        )

    @property
    def body(self) -> bytes:
        """The answer's JSON."""
        return msgspec.json.encode(ErrorBody(error=self.detail))


def type_of(status: int) -> str:
    """Returns OpenAI's kind of error for an HTTP status."""
    if status in _TYPES:
        return _TYPES[status]
    return "invalid_request_error" if status < _NOT_OURS else "server_error"


def retry_after(seconds: float) -> dict[str, str]:
    """Returns the header that says when to try again, in whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def as_api_error(
    error: TokenmillError, name_of: Callable[[str], str] = str
) -> ApiError:
    """Returns the answer that tells a caller of one of our errors.

    Args:
        error: What happened.
        name_of: Turns the name of a prompt's field into that of the caller's form.
    """
    code, param, message = _told(error)
    status = _STATUS.get(code, 500)
    headers: dict[str, str] = {}
    if isinstance(error, QueueFull):
        headers = retry_after(error.retry_after_s)
    elif status == 503:
        headers = retry_after(RETRY_S)
    if param is not None:
        param = name_of(param)
        message = f"{param}: {message}"
    if isinstance(error, ModelUnavailable):
        message, param = error.problem, "model"
        if not error.is_known:
            return ApiError(404, message, code="model_not_found", param="model")
    return ApiError(
        status,
        message,
        code=code,
        param=param,
        headers=headers,
    )


def _told(error: TokenmillError) -> tuple[str, str | None, str]:
    """Returns the code, the field at fault, and what is wrong without its name.

    Ids and codes of jobs that a caller never saw are no part of it.
    """
    if isinstance(error, JobFailed):
        code = error.error_code
        if isinstance(error, JobCancelled | JobExpired):
            code = error.code
        return code, error.field, error.message.removeprefix(f"{error.field}: ")
    if isinstance(error, InvalidRequest):
        return error.code, error.field, error.problem
    return error.code, None, str(error)


def respond(error: ApiError) -> Response:
    """Returns the HTTP answer of an error."""
    return Response(
        error.body,
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def install_handlers(app: FastAPI) -> None:
    """Makes every error of `app` one of OpenAI's form."""

    async def ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TokenmillError)
        return respond(as_api_error(error))

    async def api(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return respond(error)

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(TokenmillError, ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _left)


async def _invalid(_request: Request, error: Exception) -> Response:
    """What FastAPI found wrong with a parameter: the first of it, by name."""
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = next(iter(error.errors()), {})
    where = [str(part) for part in first.get("loc", ())]
    field = ".".join(where[1:]) or None
    problem = str(first.get("msg", "is not valid"))
    message = f"{field or 'the request'}: {problem[:1].lower()}{problem[1:]}"
    return respond(ApiError(400, message, code="invalid_request", param=field))


async def _left(_request: Request, _error: Exception) -> Response:
    """A client that leaves in the middle of its request is no fault of ours."""
    return respond(ApiError(499, "the client left", code="client_left"))


async def _http(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:200]
    message, code = str(error.detail), None
    if error.status_code == 404 and message == "Not Found":
        message = f"there is no {where}; GET /openapi.json lists what there is"
        code = "unknown_url"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{where} is not possible; allowed: {allowed or 'other methods'}"
        code = "method_not_allowed"
    return respond(
        ApiError(error.status_code, message, code=code, headers=error.headers)
    )
