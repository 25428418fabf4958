"""Logging in with an API key: a cookie for the browser, its hash for Redis.

The cookie is HttpOnly and SameSite=Strict; where the page came by https, here or at a
proxy, it is Secure and named so that only this very host can have set it. Redis
holds the hash of it and names the key behind it, so a key that is revoked ends its
sessions, and nobody who reads Redis can log in.
"""

from typing import Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from ...shared.api_keys import SESSION_S
from .auth import SECURE_SESSION_COOKIE, SESSION_COOKIE, session_cookie_of
from .context import Gateway, gateway
from .documented import StructResponse, answers, takes
from .errors import ApiError
from .origins import came_by_https, refuse_foreign_pages

router: Final = APIRouter(tags=["dashboard"])


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
    refuse_foreign_pages(request)
    try:
        asked = msgspec.json.decode(await request.body(), type=LoginRequest)
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
    is_secure = came_by_https(request)
    answer.set_cookie(
        SECURE_SESSION_COOKIE if is_secure else SESSION_COOKIE,
        cookie,
        max_age=SESSION_S,
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )
    answer.headers["Cache-Control"] = "no-store"
    return answer


@router.post("/logout", responses=answers(LogoutAnswer))
async def logout(request: Request, owner: Gateway = Depends(gateway)) -> Response:
    """Ends the session of the browser's cookie; without one nothing happens."""
    refuse_foreign_pages(request)
    cookie = session_cookie_of(request)
    if cookie:
        session = owner.client.session
        await session.patiently(lambda: owner.keys.store.close_session(cookie))
        owner.keys.forget()
    answer = StructResponse(LogoutAnswer(logged_out=True))
    for name, secure in ((SESSION_COOKIE, False), (SECURE_SESSION_COOKIE, True)):
        # Browsers take a __Host- cookie from https alone, even to end it.
        if name in request.cookies:
            answer.delete_cookie(name, secure=secure, httponly=True, samesite="strict")
    return answer
