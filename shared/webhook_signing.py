"""Signatures of webhooks, by the Standard Webhooks convention, and their check."""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Final

ID_HEADER: Final = "webhook-id"
TIME_HEADER: Final = "webhook-timestamp"
SIGNATURE_HEADER: Final = "webhook-signature"
TOLERANCE_S: Final = 300.0
"""A receiver refuses deliveries that are older, or of the future, by more than this."""
LEAST_SECRET: Final = 16
"""Characters of a secret in text, or bytes of one in base64."""
_PREFIX: Final = "whsec_"


def secret_problem(secret: str) -> str | None:
    """Says what is wrong with a secret, without showing it; None when nothing is."""
    try:
        key = _key(secret)
    except ValueError:
        return "expected base64 after whsec_"
    if len(key) < LEAST_SECRET:
        return (
            f"has {len(key)} bytes; expected at least {LEAST_SECRET}, as "
            "`openssl rand -base64 32` makes them"
        )
    return None


def _key(secret: str) -> bytes:
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def sign(
    secrets: Sequence[str], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Returns the headers that prove where a delivery comes from.

    Args:
        secrets: One, or several while receivers change over.
        message_id: The same in every attempt, so that a receiver can drop repeats.
        timestamp: Seconds since 1970, of this attempt.
        body: As it is sent.
    """
    signatures = [_signature(secret, message_id, timestamp, body) for secret in secrets]
    return {
        ID_HEADER: message_id,
        TIME_HEADER: str(timestamp),
        SIGNATURE_HEADER: " ".join(signatures),
    }


def _signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    content = f"{message_id}.{timestamp}.".encode() + body
    digest = hmac.new(_key(secret), content, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def verify(
    secret: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now_s: float | None = None,
) -> bool:
    """Whether a delivery is signed with this secret, and just now; for receivers.

    Args:
        secret: The pool's `webhooks.secret`.
        headers: Of the request, with lower-case names.
        body: Its bytes, before anything is parsed.
        now_s: Seconds since 1970; None asks the clock.
    """
    try:
        timestamp = int(headers.get(TIME_HEADER, ""))
    except ValueError:
        return False
    now = time.time() if now_s is None else now_s
    if abs(now - timestamp) > TOLERANCE_S:
        return False
    expected = _signature(secret, headers.get(ID_HEADER, ""), timestamp, body)
    given = headers.get(SIGNATURE_HEADER, "").split()
    matches = [
        hmac.compare_digest(one.encode(errors="replace"), expected.encode())
        for one in given
    ]
    return any(matches)
