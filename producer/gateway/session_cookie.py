"""Logging in with an API key: a cookie for the browser, its hash for Redis.

The cookie is HttpOnly and SameSite=Strict, Secure where the page came by https. Redis
holds the hash of it and names the key behind it, so a key that is revoked ends its
sessions, and nobody who reads Redis can log in.
"""

from typing import Final
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from ...shared.api_keys import SESSION_S
from .auth import SESSION_COOKIE
from .context import Gateway, gateway
from .documented import StructResponse, answers, takes
from .errors import ApiError

router: Final = APIRouter(tags=["dashboard"])
_MOST_KEY_BYTES: Final = 4096


class LoginRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What a browser logs in with."""

    key: str
    """An API key."""


class LoginAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Who is logged in."""

    tenant: str
    scopes: tuple[str, ...]


class LogoutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """That nobody is logged in any more."""

    logged_out: bool


@router.post(
    "/login", responses=answers(LoginAnswer, 413), openapi_extra=takes(LoginRequest)
)
async def login(request: Request, owner: Gateway = Depends(gateway)) -> Response:
    """Opens a session for an API key and sets its cookie."""
    require_same_origin(request)
    body = await request.body()
    if len(body) > _MOST_KEY_BYTES:
        raise ApiError(413, 'more than an API key; expected {"key": "tm-…"}')
    try:
        asked = msgspec.json.decode(body, type=LoginRequest)
    except msgspec.DecodeError as error:
        raise ApiError(
            400, f'{error}; expected {{"key": "tm-…"}}', code="invalid_request"
        ) from None
    session = owner.client.session
    record = await owner.keys.of_key(asked.key)
    cookie = await session.patiently(lambda: owner.keys.store.open_session(asked.key))
    if record is None or cookie is None:
        raise ApiError(
            401,
            "the API key is unknown or revoked; tokenmill keys list shows those that "
            "may be used",
            code="invalid_api_key",
        )
    answer = StructResponse(LoginAnswer(tenant=record.tenant, scopes=record.scopes))
    answer.set_cookie(
        SESSION_COOKIE,
        cookie,
        max_age=SESSION_S,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    answer.headers["Cache-Control"] = "no-store"
    return answer


@router.post("/logout", responses=answers(LogoutAnswer))
async def logout(request: Request, owner: Gateway = Depends(gateway)) -> Response:
    """Ends the session of the browser's cookie; without one nothing happens."""
    require_same_origin(request)
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        session = owner.client.session
        await session.patiently(lambda: owner.keys.store.close_session(cookie))
        owner.keys.forget()
    answer = StructResponse(LogoutAnswer(logged_out=True))
    answer.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return answer


def require_same_origin(request: Request) -> None:
    """Refuses a page of another site: it must not log anyone in or out.

    Raises:
        ApiError: 403, the browser says that the request comes from elsewhere.
    """
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    is_foreign = origin is not None and (
        urlsplit(origin).netloc != request.headers.get("host", "")
    )
    if is_foreign or site not in ("same-origin", "none"):
        raise ApiError(
            403,
            "pages of other sites may not log in or out here",
            code="origin_refused",
        )
