"""Who is calling: API keys, browser sessions, and what they may do."""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import msgspec
from fastapi import Request

from ...shared.api_keys import KeyRecord, KeyStore, fingerprint, usable
from ...shared.api_keys import Scope as Scope
from ...shared.keys import API_KEYS, session_key
from ...shared.messages import DEFAULT_TENANT
from ...shared.validate import TENANT
from .context import Gateway, gateway
from .errors import ApiError
from .leaving import STILL_ALLOWED
from .limits import OPEN, OpenRequest
from .origins import (
    SAFE_METHODS,
    names_loopback,
    refuse_foreign_names,
    refuse_foreign_pages,
    refuse_proxies,
)

if TYPE_CHECKING:
    from ...shared.config import GatewayConfig

SESSION_COOKIE: Final = "tokenmill_session"
"""Holds a browser's session: HttpOnly, SameSite=Strict, made by POST /login."""
SECURE_SESSION_COOKIE: Final = f"__Host-{SESSION_COOKIE}"
"""The same where pages come by https: no other host of the domain can set it."""
TENANT_HEADER: Final = "X-Tokenmill-Tenant"
KEY_AGE_S: Final = 2.0
"""A key that was looked up is believed for this long, so revoking takes no longer."""
_MOST_KEYS: Final = 4096
"""Keys remembered: a caller may try any number of wrong ones."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who is calling, and what it may do."""

    tenant: str
    """Whose jobs, files and batches it deals with in this request."""
    scopes: frozenset[Scope]
    key_id: str
    """Of its key; empty where none is asked for."""
    home: str | None = None
    """The tenant of its key, whomever it acts for; None where no key is asked for."""

    def may(self, scope: Scope) -> bool:
        """Whether it may do this."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def sees(self, tenant: str) -> bool:
        """Whether it may see what belongs to a tenant."""
        return tenant == self.tenant or Scope.ADMIN in self.scopes

    def owns(self, tenant: str) -> bool:
        """Whether what a tenant wrote may be read to it: acting for one is not enough.

        Without keys there are no tenants to keep apart: it is whom it says it is.
        """
        return tenant == (self.tenant if self.home is None else self.home)


class KeyRing:
    """Looks keys up, and remembers them for a moment.

    Args:
        owner: The gateway.
    """

    def __init__(self, owner: Gateway) -> None:
        self._owner = owner
        self._known: dict[tuple[str, str], tuple[float, KeyRecord | None]] = {}
        self._asked: tuple[float, bool] = (-KEY_AGE_S, True)

    @property
    def store(self) -> KeyStore:
        """The keys in Redis."""
        return KeyStore(self._owner.redis)

    async def are_asked_for(self) -> bool:
        """Whether a caller needs a key."""
        settings = self._owner.config.gateway
        if settings.auth != "auto":
            return settings.auth == "keys"
        if not is_loopback(settings):
            return True
        read_at, asked = self._asked
        if time.monotonic() - read_at > KEY_AGE_S:
            (count,) = await self._owner.client.session.read(("HLEN", API_KEYS))
            asked = count > 0
            self._asked = (time.monotonic(), asked)
        return asked

    async def of_key(self, secret: str) -> KeyRecord | None:
        """Returns the record of an API key that may be used."""
        return await self._look_up("key", fingerprint(secret), self._find)

    async def of_session(self, cookie: str) -> KeyRecord | None:
        """Returns the record of the key behind a browser's session."""
        return await self._look_up("session", fingerprint(cookie), self._find_session)

    def forget(self) -> None:
        """Looks everything up anew, as after a logout."""
        self._known.clear()
        self._asked = (-KEY_AGE_S, True)

    # Read together with those of other callers: a crowd takes two connections.
    async def _find(self, digest: str) -> KeyRecord | None:
        (raw,) = await self._owner.client.session.read(("HGET", API_KEYS, digest))
        return usable(raw)

    async def _find_session(self, digest: str) -> KeyRecord | None:
        (raw,) = await self._owner.client.session.read(("GET", session_key(digest)))
        return None if raw is None else await self._find(raw.decode(errors="replace"))

    async def _look_up(
        self,
        kind: str,
        digest: str,
        find: Callable[[str], Awaitable[KeyRecord | None]],
    ) -> KeyRecord | None:
        now = time.monotonic()
        read_at, record = self._known.get((kind, digest), (-KEY_AGE_S, None))
        if now - read_at <= KEY_AGE_S:
            return record
        record = await find(digest)
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        self._known[kind, digest] = (now, record)
        return record


def is_loopback(settings: "GatewayConfig") -> bool:
    """Whether the gateway listens on this host alone."""
    return names_loopback(settings.host)


def require(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """Returns a dependency that lets those through who may do this.

    Args:
        scope: What the endpoint does.
    """
    return _DEPENDENCIES[scope]


def _dependency(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    async def caller(request: Request) -> Caller:
        found = await identify(request)
        if not found.may(scope):
            raise ApiError(
                403,
                f"this key may not do that: it needs the scope '{scope}', and has "
                f"{', '.join(sorted(found.scopes)) or 'none'}",
                code="insufficient_scope",
            )
        return found

    return caller


_DEPENDENCIES: Final = {scope: _dependency(scope) for scope in Scope}


async def identify(request: Request) -> Caller:
    """Returns who is calling.

    Raises:
        ApiError: 401 without a key that may be used, 403 where the request may not
            come from where it does, or names a tenant that is not the caller's.
    """
    owner = await gateway(request)
    record = await _record(request, owner)
    if record is None and await owner.keys.are_asked_for():
        raise ApiError(
            401,
            "an API key is needed: send it as 'Authorization: Bearer tm-…'; the "
            "pool's operator makes one with: tokenmill keys create",
            code="missing_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if record is None:
        _refuse_strangers(request, owner.config.gateway)
        caller = Caller(tenant=DEFAULT_TENANT, scopes=frozenset(Scope), key_id="")
    else:
        caller = Caller(
            tenant=record.tenant,
            scopes=frozenset(record.scopes),
            key_id=record.id,
            home=record.tenant,
        )
        opened = request.scope.get(OPEN)
        if isinstance(opened, OpenRequest):
            opened.is_of_key(record.id)
    caller = for_tenant(caller, request.headers.get(TENANT_HEADER), TENANT_HEADER)
    request.scope["tokenmill.caller"] = caller
    request.scope[STILL_ALLOWED] = lambda: _is_still_allowed(request, caller.key_id)
    return caller


async def _is_still_allowed(request: Request, key_id: str) -> bool:
    """Whether who was let in once would be let in again, by the same key."""
    owner = await gateway(request)
    try:
        record = await _record(request, owner)
    except ApiError:
        return False
    if record is None:
        return not await owner.keys.are_asked_for()
    return record.id == key_id


def _refuse_strangers(request: Request, settings: "GatewayConfig") -> None:
    """Where no key is asked for, who reaches the gateway must be on its host.

    Unless it is open to all on purpose, and even then no foreign page may use it.
    """
    refuse_foreign_pages(request, settings.cors_origins)
    if is_loopback(settings):
        refuse_foreign_names(request)
    if settings.auth != "none":
        refuse_proxies(request)


async def _record(request: Request, owner: Gateway) -> KeyRecord | None:
    header = request.headers.get("authorization", "").strip()
    if header.lower() not in ("", "bearer"):  # which a client without a key may send
        kind, _, secret = header.partition(" ")
        record = None
        if kind.lower() == "bearer" and secret:
            record = await owner.keys.of_key(secret.strip())
        if record is None and await owner.keys.are_asked_for():
            raise ApiError(
                401,
                "the API key is unknown or revoked; expected 'Authorization: Bearer "
                "tm-…' with a key that tokenmill keys list shows",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return record
    cookie = session_cookie_of(request)
    if not cookie:
        return None
    if request.method not in SAFE_METHODS:
        refuse_foreign_pages(request, owner.config.gateway.cors_origins)
    return await owner.keys.of_session(cookie)


def session_cookie_of(request: Request) -> str | None:
    """Returns the cookie of a browser's session, if it sent one."""
    secure = request.cookies.get(SECURE_SESSION_COOKIE)
    return secure or request.cookies.get(SESSION_COOKIE)


def for_tenant(caller: Caller, named: str | None, where: str) -> Caller:
    """Returns the caller as it acts for a tenant.

    Args:
        caller: Who is calling.
        named: The tenant, None for its own.
        where: What names it, for the error.

    Raises:
        ApiError: 403, it may not; 400, that cannot be a tenant.
    """
    if named is None or named == caller.tenant:
        return caller
    if Scope.ADMIN not in caller.scopes:
        raise ApiError(
            403,
            f"this key belongs to the tenant '{caller.tenant}' and may not act for "
            f"another; only keys with the scope '{Scope.ADMIN}' may",
            code="tenant_refused",
            param=where,
        )
    if not TENANT.fullmatch(named):
        raise ApiError(
            400,
            f"{where}: '{named[:80]}' is not allowed; expected 1 to 64 "
            "letters, digits and . _ @ + -, beginning with a letter, a digit or _",
            code="invalid_request",
            param=where,
        )
    return msgspec.structs.replace(caller, tenant=named)
