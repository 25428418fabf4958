"""API keys of the gateway: what they may do, and the hash in Redis that knows them.

A key is shown once, when it is made. Redis holds its SHA-256 alone, which is enough
for 256 random bits: there is nothing to guess, so nothing slower is needed.
"""

import hashlib
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .clock import redis_ms
from .errors import InvalidRequest, ProtocolError
from .keys import API_KEYS, session_key
from .shadow_keys import SHADOW_TENANT
from .validate import TENANT

if TYPE_CHECKING:
    import redis.asyncio

PREFIX: Final = "tm-"
"""Begins every key, so that scanners for leaked secrets know one."""
SESSION_S: Final = 12 * 3600
"""How long a browser stays logged in."""
_RANDOM_BYTES: Final = 32


class Scope(StrEnum):
    """What a key may do."""

    INFERENCE = "inference"
    """Submit, follow and cancel jobs of its tenant."""
    BATCH = "batch"
    """Files and batches of its tenant."""
    READ = "read"
    """Look: metrics, usage and the dashboard of its tenant."""
    ADMIN = "admin"
    """Everything, for every tenant."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a key."""

    v: int = 1
    id: str
    """Names it where the key itself must not be shown."""
    tenant: str
    scopes: tuple[Scope, ...]
    name: str = ""
    created_ms: int = 0
    revoked_ms: int | None = None
    """When it was revoked, in milliseconds of Redis' clock. The record stays: a pool
    whose last key is gone does not open itself to everyone."""


def fingerprint(secret: str) -> str:
    """Returns the SHA-256 of a key or cookie, in hex."""
    return hashlib.sha256(secret.encode("utf-8", errors="replace")).hexdigest()


class KeyStore:
    """The pool's API keys and browser sessions.

    Args:
        client: Redis; replies are bytes.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._redis = client

    async def create(
        self, tenant: str, scopes: Iterable[Scope], name: str = ""
    ) -> tuple[str, KeyRecord]:
        """Makes a key.

        Args:
            tenant: Whose jobs it may submit and see.
            scopes: What it may do; at least one.
            name: What it is for, in the list of keys.

        Returns:
            The key, which nothing can show again, and its record.

        Raises:
            InvalidRequest: The tenant cannot be one, or no scope is given.
        """
        if not TENANT.fullmatch(tenant) or tenant == SHADOW_TENANT:
            raise InvalidRequest(
                "tenant",
                f"'{tenant[:80]}' is not allowed; expected 1 to 64 letters, digits "
                "and . _ @ + -, beginning with a letter, a digit or _, and no owner of "
                "copies",
            )
        granted = tuple(scope for scope in Scope if scope in set(scopes))
        if not granted:
            raise InvalidRequest(
                "scope", f"none is given; expected some of {', '.join(Scope)}"
            )
        secret = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        record = KeyRecord(
            id=f"key-{secrets.token_hex(6)}",
            tenant=tenant,
            scopes=granted,
            name=name[:200],
            created_ms=await redis_ms(self._redis),
        )
        await self._do(
            "HSET", API_KEYS, fingerprint(secret), msgspec.json.encode(record)
        )
        return secret, record

    async def records(self) -> list[KeyRecord]:
        """Returns every key, revoked ones too, the oldest first."""
        raw = await self._do("HGETALL", API_KEYS)
        records = [_decode(value) for value in raw.values()]
        return sorted(records, key=lambda record: (record.created_ms, record.id))

    async def revoke(self, key_id: str) -> KeyRecord:
        """Ends a key, and every session that was opened with it.

        Args:
            key_id: Its id, as `records` has it.

        Returns:
            The record; one that was revoked before keeps its time.

        Raises:
            InvalidRequest: There is no such key.
        """
        for digest, raw in (await self._do("HGETALL", API_KEYS)).items():
            record = _decode(raw)
            if record.id != key_id:
                continue
            if record.revoked_ms is None:
                now_ms = await redis_ms(self._redis)
                record = msgspec.structs.replace(record, revoked_ms=now_ms)
                await self._do("HSET", API_KEYS, digest, msgspec.json.encode(record))
            return record
        raise InvalidRequest(
            "id", f"there is no key '{key_id[:80]}'; tokenmill keys list shows all"
        )

    async def find(self, digest: str) -> KeyRecord | None:
        """Returns the record of a key that may be used, by its fingerprint."""
        return usable(await self._do("HGET", API_KEYS, digest))

    async def count(self) -> int:
        """Returns how many keys were ever made."""
        return int(await self._do("HLEN", API_KEYS))

    async def open_session(self, secret: str) -> str | None:
        """Logs a browser in.

        Args:
            secret: An API key.

        Returns:
            The value of the cookie, or None for a key that is unknown or revoked.
        """
        digest = fingerprint(secret)
        if await self.find(digest) is None:
            return None
        cookie = secrets.token_urlsafe(_RANDOM_BYTES)
        await self._redis.set(session_key(fingerprint(cookie)), digest, ex=SESSION_S)
        return cookie

    async def _do(self, *command: str | bytes) -> Any:  # noqa: ANN401 - a reply
        return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def close_session(self, cookie: str) -> None:
        """Logs a browser out."""
        await self._redis.delete(session_key(fingerprint(cookie)))


def usable(raw: bytes | None) -> KeyRecord | None:
    """Returns the record in an entry of the hash, unless its key was revoked.

    Raises:
        ProtocolError: The entry is no key.
    """
    record = None if raw is None else _decode(raw)
    return record if record is not None and record.revoked_ms is None else None


def _decode(raw: bytes) -> KeyRecord:
    try:
        return msgspec.json.decode(raw, type=KeyRecord)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"{API_KEYS} has an entry that is no key: {error}"
        ) from None
